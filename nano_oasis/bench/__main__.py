"""`python -m nano_oasis.bench throughput|serve|kernels|step`: the command line.

Owns: which command runs, and how its errors end it. Must not know: what any of them measures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nano_oasis.bench import kernels, serve, step, throughput
from nano_oasis.cli import make_parser
from nano_oasis.config import ConfigError

COMMANDS = {
    "throughput": (throughput, "offline: prompts of one length through the engine, tokens per second"),
    "serve": (serve, "a load on any OpenAI-compatible server: TTFT, TPOT, ITL, throughput"),
    "kernels": (kernels, "every CPU kernel against the floor of its bytes or products"),
    "step": (step, "where the time of one decode step goes"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser("bench", "Measure, and say what the machine could do at best.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=about[:1].upper() + about[1:] + ".",
                                  allow_abbrev=False)  # fmt: skip
        module.add_options(sub)
        sub.set_defaults(work=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    from nano_oasis.bench.load import LoadError
    from nano_oasis.tokenizer import TokenizerError
    from nano_oasis.weights import CheckpointError

    args = build_parser().parse_args(argv)
    try:
        return int(args.work(args))
    except (ConfigError, LoadError, CheckpointError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
