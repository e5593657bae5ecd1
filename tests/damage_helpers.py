"""What the tests of damaged checkpoints share: the demand on a refusal, and random edits of a file."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from nano_oasis.weights import CheckpointError, load_checkpoint

HUGE = 2**60


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def refused(action: Callable[[], Any], *parts: str) -> None:
    """`action` must raise CheckpointError with every part in its message, quickly and in little memory."""
    tracemalloc.start()
    begin = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as caught:
            action()
        seconds, peak = time.monotonic() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for part in parts:
        assert re.search(part, str(caught.value)), str(caught.value)
    assert seconds < 1 and peak < 16 * 2**20, (seconds, peak)


def loads_or_refuses(path: Path) -> None:
    begin = time.monotonic()
    try:
        load_checkpoint(path, None)
    except CheckpointError as error:
        assert str(path) in str(error)
    assert time.monotonic() - begin < 2


QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDITS = st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)
