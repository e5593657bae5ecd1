"""Typed, range-checked access to the fields of config.json and to the keys of a GGUF file.

Owns: what a well-formed value is, and the wording when it is not. Must not know: what fields mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from nano_oasis.weights.errors import CheckpointError

_MAX_JSON = 1 << 26  # bytes; the index of a model with 100,000 tensors has about 10 MB


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if it is missing, too long or not an object."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON:
            raise CheckpointError.at(path, f"has {size} bytes; at most {_MAX_JSON} are allowed")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError.at(path, "is missing") from error
    except OSError as error:
        raise CheckpointError.at(path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError.at(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError.at(path, f"must hold a JSON object, not {type(value).__name__}")
    return value


class Fields:
    """The fields of one JSON object or one GGUF file. An explicit null counts as absent.

    Every getter raises CheckpointError naming the file and the field. A getter without a default refuses
    an absent field.
    """

    def __init__(self, path: Path, data: dict[str, Any], prefix: str = "", parent: str = "") -> None:
        self.path, self.data = path, data
        self.prefix = prefix  # of every key in `data`, such as "llama."
        self.parent = parent  # the object this one is in, for messages

    def fail(self, name: str, message: str) -> CheckpointError:
        return CheckpointError.at(self.path, f"field {self.parent + self.prefix + name!r} {message}")

    def raw(self, name: str) -> Any:
        return self.data.get(self.prefix + name)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.data

    def section(self, name: str) -> Fields | None:
        """The object under `name` with its own fields; None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, got {value!r:.80}")
        return Fields(self.path, value, parent=f"{self.parent}{name}.")

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.maybe_integer(name, low, high)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, "is missing")
        return value

    def maybe_integer(self, name: str, low: int = 1, high: int = 2**31 - 1) -> int | None:
        value = self.raw(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.fail(name, f"must be an integer, got {value!r:.80}")
        if value is not None and not low <= value <= high:
            raise self.fail(name, f"must be between {low} and {high}, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.maybe_number(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, "is missing")
        return value

    def maybe_number(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(name, f"must be a number, got {value!r:.80}")
        if abs(value) > 1e30 or not math.isfinite(value) or value <= 0:
            raise self.fail(name, f"must be a finite number above 0, got {value!r:.80}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail(name, f"must be true or false, got {value!r:.80}")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.fail(name, f"must be a string, got {value!r:.80}")
        return default if value is None else value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids; negative ones mean "none"."""
        value = self.raw(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or i >= 2**31:
                raise self.fail(name, f"must be a token id or a list of them, got {value!r:.80}")
        return tuple(i for i in ids if i >= 0)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Refuse a feature that is not implemented, unless its field is absent, null or a harmless value."""
        value = self.raw(name)
        if value is not None and value not in harmless:
            raise self.fail(name, f"asks for a feature that is not supported ({value!r:.80})")
