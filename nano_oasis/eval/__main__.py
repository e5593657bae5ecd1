"""`python -m nano_oasis.eval`: the command line.

Owns: its options and what is shown in the terminal. Must not know: how anything is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from nano_oasis.cli import LoadProgress, WorkProgress, make_parser
from nano_oasis.config import ConfigError
from nano_oasis.eval.settings import Setting

_DEFAULT = Setting()
WIDTH = 160


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "eval", "Compare the oasis mode with dense attention, on generated tasks or on your own data."
    )
    parser.add_argument("--model", default="smollm2", help="GGUF file, model folder, hub id, or 'smollm2'")
    parser.add_argument("--tasks", default="", help="tasks or groups (niah, ruler, all), with commas; "
                        "'list' shows them")  # fmt: skip
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help="text file, a folder "
                        "of them, or .jsonl with prompt or messages (and answer); repeatable")  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="folder for results.jsonl, eval.json and "
                        "report.html; a run with the same folder continues where it stopped")  # fmt: skip
    swept = parser.add_argument_group("swept (several values, separated by commas)")
    for name, about in (
        ("context", "tokens, answer included (default: 4000)"),
        ("budget", f"tokens read per layer, or a share of the context (default: {_DEFAULT.budget})"),
        ("selector", f"key sketch: exact (the oracle), fourbit, twobit, sign1, minmax, mean (default: "
                     f"{_DEFAULT.selector})"),
        ("predictor", f"previous, lookahead, current (default: {_DEFAULT.predictor})"),
        ("miss-policy", f"repair, wait, estimate, skip (default: {_DEFAULT.miss_policy})"),
        ("block", f"tokens per KV block (default: {_DEFAULT.block})"),
        ("head-groups", "block choices per layer (default: one for each KV head)"),
    ):  # fmt: skip
        default = "4000" if name == "context" else getattr(_DEFAULT, name.replace("-", "_"))
        swept.add_argument(f"--{name}", default=default, metavar="A,B,...", help=about)
    parser.add_argument("--samples", type=int, default=20, help="per task and context (default: 20)")
    parser.add_argument("--steps", type=int, default=64, help="teacher-forced tokens per sample, for KL and "
                        "recall (default: 64)")  # fmt: skip
    parser.add_argument("--recall-samples", type=int, default=5, help="per task and context; recall takes "
                        "another dense pass over each prompt; 0 = none (default: 5)")  # fmt: skip
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help="longest answer of tasks and prompts; default: the task's own, 64 for prompts",
    )
    parser.add_argument("--link-bandwidth", metavar="BYTES", help="copies take as long as over a link of so "
                        "many bytes a second, such as 2GiB; default: as they take")  # fmt: skip
    parser.add_argument("--batch", type=int, help="samples decoded together; default: by memory, at most 16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 = OMP_NUM_THREADS or all cores"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when nothing could be run or a sample failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.tasks == "list":
        from nano_oasis.eval.tasks import all_tasks

        for task in all_tasks().values():
            print(f"{task.name:16} {task.about}")
        return 0
    from nano_oasis.eval.api import run  # imports torch: only when it is needed
    from nano_oasis.eval.data import DataError
    from nano_oasis.eval.tasks import TaskError
    from nano_oasis.tokenizer import TokenizerError
    from nano_oasis.weights import CheckpointError

    options = {k: v for k, v in vars(args).items()}
    try:
        for name in ("block", "head_groups", "context"):
            if options[name] is not None:
                options[name] = _numbers(name, str(options[name]))
        with LoadProgress() as loading, WorkProgress() as bar:
            result = run(options.pop("model"), **options, progress=bar, loading=loading)
    except (ConfigError, TaskError, DataError, CheckpointError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "the same command continues" if args.output else "with --output, a run can be continued"
        print(f"\ninterrupted; {again}", file=sys.stderr)
        return 130
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a file has no width: nothing is cut off
    console.print(result.table())
    for record in result.failed:
        where = f"{record['group']}/{record['context']}/{record['index']} {record['label']}"
        print(f"failed: {where}: {record['error']}", file=sys.stderr)
    if args.output:
        print(f"report: {args.output}/report.html")
    return 1 if result.failed else 0


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option}: expected whole numbers separated by commas, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
