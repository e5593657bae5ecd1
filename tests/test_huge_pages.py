"""Huge pages: asked for where there is something to ask for, and memory stays what it was.

Owns: that check. Must not know: who uses it.
"""

from __future__ import annotations

import sys

import pytest
import torch

from nano_oasis.memory.huge_pages import PAGE, ask_for_huge_pages, on_huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_large_tensors_get_them_and_small_ones_are_left_alone() -> None:
    large, small = torch.zeros(4 * PAGE, dtype=torch.uint8), torch.zeros(PAGE // 2, dtype=torch.uint8)
    large[PAGE] = 7
    assert ask_for_huge_pages(large) and large[PAGE] == 7 and int(large.sum()) == 7
    assert not ask_for_huge_pages(small) and not ask_for_huge_pages(torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_matrices_side_by_side_keep_their_numbers(dtype):
    """A layer's worth, none of which is a page or a whole number of lines."""
    matrices = [torch.randint(-99, 99, (n, 577)).to(dtype) for n in (3000, 1, 5000, 7)]
    placed = on_huge_pages(matrices)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(matrices, placed, strict=True))
    assert all(m.is_contiguous() and m.data_ptr() % 64 == 0 for m in placed)
    if sys.platform.startswith("linux"):
        assert placed[0].data_ptr() % PAGE == 0
        assert len({m.untyped_storage().data_ptr() for m in placed}) == 1
    placed[1].fill_(5)
    assert torch.equal(placed[0], matrices[0]) and torch.equal(placed[2], matrices[2])


def test_less_than_a_page_stays_where_it_is():
    small = [torch.ones(3, 5), torch.ones(2)]
    assert all(a is b for a, b in zip(on_huge_pages(small), small, strict=True))
