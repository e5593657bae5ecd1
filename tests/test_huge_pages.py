"""Huge pages: asked for where there is something to ask for, and memory stays what it was.

Owns: that check. Must not know: who uses it.
"""

from __future__ import annotations

import sys

import pytest
import torch

from nano_oasis.memory.huge_pages import PAGE, ask_for_huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_large_tensors_get_them_and_small_ones_are_left_alone() -> None:
    large, small = torch.zeros(4 * PAGE, dtype=torch.uint8), torch.zeros(PAGE // 2, dtype=torch.uint8)
    large[PAGE] = 7
    assert ask_for_huge_pages(large) and large[PAGE] == 7 and int(large.sum()) == 7
    assert not ask_for_huge_pages(small) and not ask_for_huge_pages(torch.empty(0))
