"""What is kept of a run: one line of JSON per sample and setting, and per sample and choice of blocks.

Owns: the records' fields, their keys, and the file that lets a killed run continue.
Must not know: models, how figures are measured, tables and plots.

Fields of a `run` record: key, kind, group, context, index, setting (null: dense), label, status (ok or
failed), error; then, where it went well,

    prompt_tokens, output_tokens, output, pieces     the greedy answer; pieces are its tokens' texts
    score                                            0 to 100; null without a known answer
    divergence                                       first token that differs from dense's; null: none does
    kl, same_top                                     per teacher-forced step: nats; is dense's top token ours
    hit_rate, skipped, wait_share, batch             of all samples decoded together (batch: how many)
    budget_tokens, device_bytes, dense_bytes         of this request at the end, sketches included

and of a `recall` record: key, kind, group, context, index, choice, budget (as asked for), and Recall's
fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nano_oasis.config import ConfigError
from nano_oasis.eval.tasks import fingerprint

Record = dict[str, Any]
FILE = "results.jsonl"
_PROBES, _PROBE = 256, 1 << 14  # pieces of a weight file that stand for it, and the bytes of each


def model_salt(config: object, path: Path, dtype: torch.dtype, version: str) -> str:
    """Names a model by its shape, and each file's name, size and pieces of its bytes: all would take too
    long."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as data:
                for i in range(_PROBES):
                    data.seek(max(size - _PROBE, 0) * i // (_PROBES - 1))
                    digest.update(data.read(_PROBE))
    return fingerprint(config, digest.hexdigest(), str(dtype), version)


class RecordFile:
    """Records by key, each appended to DIR/results.jsonl when it is made. Without a folder: in memory
    only. Raises ConfigError for a folder that cannot be used."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / FILE if folder else None
        self._records: dict[str, Record] = {}
        if folder and self.path:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.path.touch()
                self._read(self.path)
            except OSError as error:
                raise ConfigError(f"output: {self.path}: {error.strerror or error}") from error

    def _read(self, path: Path) -> None:
        """A run that was killed may have left half a line at the end: it is cut off."""
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with path.open("r+b") as file:
                file.truncate(end)
        for line in data[:end].splitlines():
            try:
                record = json.loads(line)
                self._records[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                continue  # not ours, or damaged: it will be made again

    def done(self, key: str) -> bool:
        """Failed samples are tried again by the next run."""
        return key in self._records and self._records[key].get("status", "ok") == "ok"

    def add(self, record: Record) -> None:
        self._records[record["key"]] = record
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def take(self, keys: Iterable[str]) -> list[Record]:
        """The records of these keys, in this order, those that exist."""
        return [self._records[key] for key in keys if key in self._records]
