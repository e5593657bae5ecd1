"""The one error of this package, and the table of what can be loaded.

Owns: CheckpointError and the wording that every refusal shares.
Must not know: file formats, torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class CheckpointError(ValueError):
    """A model that cannot be loaded. The message names the file, and the tensor or field if it is one."""

    @classmethod
    def at(cls, path: Path, message: str) -> CheckpointError:
        """The error for `path`: "<path>: <message>"."""
        return cls(f"{path}: {message}")


def some(names: Iterable[str], limit: int = 4) -> str:
    """A few names of many, for messages: "a, b, c, d and 26 more"."""
    listed = sorted(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
