"""`python -m nano_oasis.spec.train`: a draft head for any model, from what the model itself writes.

Owns: the command line, the order of the stages, the work folder. Must not know: how a stage works.

    prompts.py     texts and topics -> prompts
    recording.py   the target answers them; tokens and final states are kept (shards in the work folder)
    fit.py         the head learns to go on from every state (a checkpoint in the work folder)
    measure.py     its drafts against what the target wrote about documents that were held out

Every stage continues where a killed run stopped, and gives what an uninterrupted run would have given.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_oasis.cli import LoadProgress, WorkProgress, make_parser
from nano_oasis.config import ConfigError, default_threads

if TYPE_CHECKING:  # torch is imported only when something is done
    from torch import Tensor

    from nano_oasis.model import Model
    from nano_oasis.spec.prompts import PromptMaker
    from nano_oasis.spec.recording import Recording
    from nano_oasis.tokenizer import Tokenizer

SHARD = 480  # prompts per shard: minutes of work that a kill can cost
FEWEST = 40  # prompts of the only shard of a small run: two of them are held out
HELD_TEXTS = 100  # that drafts are measured on, at most
SAVE_EVERY = 50  # steps
MAX_LEN = 2048  # tokens of a recorded text
LIMITS = {
    "tokens": (1, 10**9), "max_new_tokens": (4, 1024), "steps": (1, 10**7), "batch": (1, 4096),
    "inner": (16, 2**16), "blocks": (0, 8), "vocab": (4, 2**20), "threads": (0, 1024), "seed": (0, 2**31 - 1),
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "spec.train", "Train a draft head for speculative decoding on the model's own texts."
    )
    parser.add_argument("--model", default="smollm2", help="GGUF file, model folder, hub id, or 'smollm2'")
    parser.add_argument("--data", action="append", required=True, metavar="PATH",
                        help="text file or a folder, which prompts are cut from; repeatable")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE", help="the head: a .safetensors file")
    parser.add_argument("--work", metavar="DIR", help="recordings and the checkpoint; the same command with "
                        "the same folder continues (default: FILE.work)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=450_000, help="the target writes (default: 450000)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="of one text (default: 200)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
                        help="of the target as it writes; auto = as the engine (default: auto)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=5000, help="of training (default: 5000)")
    parser.add_argument("--batch", type=int, default=32, help="stretches of 16 tokens (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (default: 0.002)")
    parser.add_argument("--products", default="float32", choices=("float32", "bfloat16"), help="of training; "
                        "bfloat16 is faster where the CPU multiplies it (default: float32)")  # fmt: skip
    parser.add_argument("--inner", type=int, help="width of the MLPs (default: 2.1 times the hidden size)")
    parser.add_argument("--blocks", type=int, default=2, help="MLPs, one after the other (default: 2)")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that can be drafted (default: 8192)")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 = OMP_NUM_THREADS or all cores"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when something could not be used, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    from nano_oasis.tokenizer import TokenizerError
    from nano_oasis.weights import CheckpointError

    try:
        with WorkProgress(line="{done} of {total} {what}") as report:
            figures = Run(args, report).all()
    except (ConfigError, CheckpointError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk: what was written before stays
        print(f"error: {error}; the same command continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        return 130
    print(show(figures))
    print(f"head: {args.output} ({Path(args.output).stat().st_size / 1e6:.2f} MB)")
    return 0


def show(figures: dict[str, Any]) -> str:
    """The held-out acceptance as a table."""
    lines = [f"{'texts':>10} {'steps':>7} {'tokens/step':>12}   accepted up to draft 1, 2, ..."]
    for name, row in figures.items():
        shares = "  ".join(f"{share:6.1%}" for share in row["accepted"])
        lines.append(f"{name:>10} {row['steps']:7} {row['per_step']:12.2f}   {shares}")
    return "\n".join(lines)


class Run:
    """One run of the command; `args` are those of build_parser."""

    def __init__(self, args: argparse.Namespace, report: WorkProgress) -> None:
        import torch

        from nano_oasis.spec.prompts import PromptMaker, digest, read_documents
        from nano_oasis.tokenizer import load_tokenizer
        from nano_oasis.weights import load_config, resolve_model

        _check(args)
        self.args, self.report = args, report
        self.output = Path(args.output)
        self.work = Path(args.work or f"{args.output}.work")
        documents = read_documents(args.data)
        torch.set_num_threads(args.threads or default_threads())
        self.path = resolve_model(args.model)
        config = load_config(self.path)
        self.max_len = min(config.max_position, MAX_LEN)
        if args.max_new_tokens + 16 > self.max_len:
            raise ConfigError(
                f"max_new_tokens: {args.max_new_tokens} leaves no room in {self.max_len} tokens"
            )
        self.tokenizer: Tokenizer = load_tokenizer(self.path)
        self.num_tokens = min(self.tokenizer.vocab_size, config.vocab_size)
        self.make_prompt: PromptMaker = PromptMaker(documents, self.tokenizer, args.seed)
        self.data = digest(documents)
        if not self.make_prompt.chat:
            print("the model has no chat template: it only continues texts", file=sys.stderr)
        _check_places(self.output, self.work)

    def all(self) -> dict[str, Any]:
        """Record, train, measure, write the file. Returns the held-out figures, by kind of prompt."""
        model = self.load(None)
        self._claim(model)
        texts = self._record(model)
        return self._fit([t for t in texts if not t.held], self._held(model, texts), model)

    def load(self, dtype: str | None) -> Model:
        """The target; None = as the engine would load it on the CPU."""
        import torch

        from nano_oasis.model import Model
        from nano_oasis.weights import load_checkpoint

        wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(dtype or "")
        with LoadProgress() as loading:
            found = load_checkpoint(
                self.path, wanted, "cpu", lambda done, total: loading("weights", done, total)
            )
        return Model(found.config, found.tensors, self.max_len, found.dtype)

    def _claim(self, model: Model) -> None:
        """The work folder belongs to one model and one set of prompts. Raises ConfigError if to another."""
        from nano_oasis.spec.head import fingerprint

        values = fingerprint(model).numpy().tobytes()
        recipe = {
            "model": hashlib.blake2b(values, digest_size=12).hexdigest(), "data": self.data,
            "seed": self.args.seed, "dtype": self.args.dtype, "max_new_tokens": self.args.max_new_tokens,
        }  # fmt: skip
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / "recipe.json"
        if not file.exists():
            file.write_text(json.dumps(recipe))
            return
        try:
            before = json.loads(file.read_text())
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise ConfigError(f"work: {file} is damaged; give another folder")
        for name, value in recipe.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"work: {self.work} holds another run: its {name} is {before.get(name)!r}, this one's is "
                    f"{value!r}; give another folder"
                )

    def _record(self, model: Model) -> list[Recording]:
        """Stage 1: shards until enough is written. The last one may write more than was asked for."""
        from nano_oasis.spec.recording import load_recordings

        args, found, total = self.args, list[Any](), 0
        size = min(max(-(-args.tokens // args.max_new_tokens), FEWEST), SHARD)
        writer = None
        while total < args.tokens:
            number = len(found)
            file = self.work / f"shard-{number:04}.safetensors"
            if not file.exists():
                if writer is None:
                    writer = model if args.dtype == "auto" else self.load(args.dtype)
                self._write(file, range(number * size, (number + 1) * size), writer, total, args.tokens)
            texts = load_recordings(file)
            found.append(texts)
            total += sum(len(t.tokens) - t.prompt for t in texts)
        return [text for texts in found for text in texts]

    def _write(self, file: Path, numbers: Sequence[int], model: Model, done: int, total: int) -> None:
        from nano_oasis.spec.recording import Recorder, save_recordings

        ends = frozenset(self.tokenizer.eos_ids) | frozenset(model.config.eos_token_ids)
        recorder = Recorder(model, self.num_tokens, ends, self.args.max_new_tokens, self.args.seed)
        count = done

        def progress(more: int) -> None:
            nonlocal count
            count += more
            self.report("tokens written", min(count, total), total)

        save_recordings(file, recorder.run([self.make_prompt(n) for n in numbers], progress))

    def _held(self, model: Model, texts: list[Recording]) -> list[Recording]:
        """What drafts are measured on is written by the target in the dtype that it is served in."""
        from nano_oasis.spec.recording import load_recordings

        held = [t for t in texts if t.held][:HELD_TEXTS]
        if self.args.dtype == "auto":
            return held
        file = self.work / "held-out.safetensors"
        if not file.exists():
            most = sum(len(t.tokens) - t.prompt for t in held)
            self._write(file, [t.number for t in held], model, 0, most)
        return load_recordings(file)

    def _fit(self, texts: list[Recording], held: list[Recording], model: Model) -> dict[str, Any]:
        """Stages 2 and 3."""
        import torch

        from nano_oasis.spec.fit import Texts, Trainer, draft_vocabulary
        from nano_oasis.spec.head import DraftHead, HeadConfig, save_head
        from nano_oasis.spec.measure import acceptance

        args, hidden = self.args, model.config.hidden_size
        inner = args.inner or max(21 * hidden // 160 * 16, 16)
        config = HeadConfig(hidden, inner, args.blocks, min(args.vocab, self.num_tokens) // 4 * 4)
        draft_ids = draft_vocabulary(texts, self.num_tokens, config.vocab)
        trainer = Trainer(
            config, Texts.of(texts), model.embed[:], model.lm_head[:], draft_ids, steps=args.steps,
            batch=args.batch, lr=args.lr, seed=args.seed, half=args.products == "bfloat16",
        )  # fmt: skip
        names = ("steps", "batch", "lr", "products", "seed", "tokens", "blocks")
        recipe = {n: getattr(args, n) for n in names} | {"inner": config.inner, "vocab": config.vocab}
        checkpoint = self.work / "checkpoint.safetensors"
        if checkpoint.exists():
            trainer.resume(checkpoint, recipe)
        average = 0.0

        def progress(step: int, loss: float) -> None:
            nonlocal average
            average = loss if not average else average + 0.05 * (loss - average)
            self.report(f"steps, loss {average:.3f}", step, args.steps)

        while trainer.step < args.steps:
            trainer.run(min(trainer.step + SAVE_EVERY, args.steps), progress)
            trainer.save(checkpoint, recipe)
        weights: dict[str, Tensor] = {n: w.detach().to(torch.bfloat16) for n, w in trainer.weights.items()}
        head = DraftHead(config, weights, draft_ids, model)  # as it will be after loading
        groups = {"all": held}
        for text in held:
            groups.setdefault(self.make_prompt(text.number).kind, []).append(text)
        figures = {name: acceptance(head, some) for name, some in groups.items()}
        about = {
            "acceptance": figures, "texts": len(texts),
            "written": sum(len(t.tokens) - t.prompt for t in texts),
            "recipe": recipe | {"max_new_tokens": args.max_new_tokens, "dtype": args.dtype},
        }  # fmt: skip
        self.output.parent.mkdir(parents=True, exist_ok=True)
        save_head(self.output, config, weights, draft_ids, model, about)
        return figures


def _check(args: argparse.Namespace) -> None:
    for name, (low, high) in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name}: must be between {low} and {high}, got {value}")
    if not 0 < args.lr <= 1:
        raise ConfigError(f"lr: must be above 0 and at most 1, got {args.lr}")
    if args.inner is not None and args.inner % 16:
        raise ConfigError(f"inner: must be a multiple of 16, got {args.inner}")
    if Path(args.output).suffix != ".safetensors":
        raise ConfigError(f"output: must end in .safetensors, got {args.output!r}")


def _check_places(output: Path, work: Path) -> None:
    """An hour of work should not end at a file that cannot be written."""
    if output.is_dir():
        raise ConfigError(f"output: {output} is a folder")
    for name, folder in (("output", output.parent), ("work", work)):
        probe = folder / f".{output.name}.probe"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"{name}: {folder} cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
