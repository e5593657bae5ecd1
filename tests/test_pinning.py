"""Pinning the host tier: layer by layer, undone at the end, and only a warning where it is not allowed."""

import logging

import pytest
import torch
from host_tier_cases import L, create, ids, kv

from nano_oasis.memory.formats import HostTierError


class FakeCuda:
    """cudart's two functions, with room for `limit` pieces."""

    def __init__(self, limit: int) -> None:
        self.limit, self.pinned, self.sizes = limit, {}, []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.pinned) == self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.sizes.append(self.pinned.pop(address))
        return 0


def with_cuda(monkeypatch, limit: int) -> FakeCuda:
    fake = FakeCuda(limit)

    def check(code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return fake


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin")
def test_pinning_without_cuda_is_refused(tmp_path):
    with pytest.raises(HostTierError, match="no CUDA device; use pin=False"):
        create(pin=True)


def test_pinning_a_file_is_refused(tmp_path):
    with pytest.raises(HostTierError, match="file-backed host tier cannot be pinned"):
        create(pin=True, path=str(tmp_path))


def test_pins_layer_by_layer_and_undoes_it(monkeypatch):
    fake = with_cuda(monkeypatch, 1000)
    with create(format="int8", pin=True) as tier:
        tier._pinner.wait()
        assert len(fake.pinned) == L * 4  # keys, values, and the scales of each
        assert all(address % 4096 == 0 for address in fake.pinned)
        assert tier.pinned_bytes == sum(fake.pinned.values()) == tier.bytes_per_block * tier.num_blocks
    assert not fake.pinned


def test_pinning_beyond_the_lock_limit_warns_and_works(monkeypatch, caplog):
    fake = with_cuda(monkeypatch, 2)
    with caplog.at_level(logging.WARNING), create(pin=True) as tier:
        tier._pinner.wait()
        assert len(fake.pinned) == 2 and tier.pinned_bytes == sum(fake.pinned.values())
        assert "ulimit -l" in caplog.text and "out of memory" in caplog.text
        tier.store(ids(1), *kv(1))
    assert not fake.pinned
