"""The host tier: every format keeps its bytes, in memory and in a file, and beside other threads."""

import os
import threading
from pathlib import Path

import pytest
import torch
from host_tier_cases import CONFIG, B, D, H, L, create, ids, kv

from nano_oasis.kernels.reference_blocks import runs
from nano_oasis.memory.formats import DTYPES, HostTierError
from nano_oasis.memory.host_tier import num_blocks_for

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_close(got: torch.Tensor, want: torch.Tensor, fmt: str) -> None:
    """Bit for bit, or within half an int8 step of the group's largest value, plus bf16 rounding."""
    if fmt == "auto":
        assert torch.equal(got, want)
    else:
        assert (got - want).abs().max() <= want.abs().max() * (0.5 / 127 * 1.01 + 2**-8)


# --- round trips ------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("fmt", ["auto", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_round_trip(tmp_path, dtype, fmt, where, device):
    path = str(tmp_path / "tier.kv") if where == "file" else None
    order = ids(5, 6, 7, 2, 11, 0, 9)  # runs and single blocks
    keys, values = kv(7, dtype, device=device)
    with create(dtype=dtype, format=fmt, path=path) as tier:
        tier.store(order, keys, values)
        for layer in range(L):
            for heads in (None, slice(0, 1), slice(1, 2)):
                sub = heads or slice(None)
                pick = torch.tensor([3, 1, 2, 6])
                out = [torch.full_like(x[layer, :4, :, sub], torch.nan) for x in (keys, values)]
                tier.load(layer, order[pick], *out, heads=heads)
                assert_close(out[0], keys[layer, pick][:, :, sub], fmt)
                assert_close(out[1], values[layer, pick][:, :, sub], fmt)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("slots", [(4, 5, 6, 7, 8), (9, 3, 4, 0, 7), (8, 7, 6, 5, 4)])
@pytest.mark.parametrize("fmt", ["auto", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_load_into_slots_writes_these_slots_and_no_others(dtype, fmt, slots, device, monkeypatch):
    monkeypatch.setattr("nano_oasis.memory.host_tier._LOAD_CHUNK", 2 * B * H * D * 4)  # several chunks
    keys, values = kv(12, dtype, device=device)
    with create(dtype=dtype, format=fmt) as tier:
        tier.store(torch.arange(12), keys, values)
        blocks = ids(2, 3, 4, 11, 0)
        for heads in (None, slice(1, 2)):
            sub = heads or slice(None)
            loaded = [torch.empty_like(keys[1, :5, :, sub]), torch.empty_like(keys[1, :5, :, sub])]
            tier.load(1, blocks, *loaded, heads=heads)
            whole = torch.full((2, 10, B, H, D), -7.0, dtype=dtype, device=device)
            pools = [whole[0][:, :, sub], whole[1][:, :, sub]]  # strided, when heads are a slice
            tier.load_into(1, blocks, ids(*slots), *pools, heads=heads)
            others = [s for s in range(10) if s not in slots]
            for pool, want, side in zip(pools, loaded, whole, strict=True):
                assert torch.equal(pool[list(slots)].cpu(), want.cpu())
                assert (side[others] == -7).all()
            if heads:
                assert (whole[:, :, :, 0] == -7).all()


def test_layer_by_layer_equals_all_at_once():
    for fmt in ("auto", "int8"):
        keys, values = kv(12)
        with create(format=fmt) as whole, create(format=fmt) as layered:
            whole.store(torch.arange(12), keys, values)
            for layer in (2, 0, 1):
                layered.store_layer(layer, torch.arange(12), keys[layer], values[layer])
            assert [whole.checksum(b) for b in range(12)] == [layered.checksum(b) for b in range(12)]


def test_chunked_stores_equal_one_by_one(monkeypatch):
    keys, values = kv(12)
    with create(format="int8") as whole, create(format="int8") as single:
        monkeypatch.setattr("nano_oasis.memory.host_tier._STORE_CHUNK", 5 * 4 * L * B * H * D)
        order = ids(3, 4, 5, 6, 7, 8, 9, 2, 1, 11, 10, 0)
        whole.store(order, keys, values)
        for i, block in enumerate(order):
            single.store(block[None], keys[:, i : i + 1], values[:, i : i + 1])
        assert [whole.checksum(b) for b in range(12)] == [single.checksum(b) for b in range(12)]


def test_as_it_is_means_nan_inf_and_signed_zero_too():
    keys, values = kv(1)
    keys[0, 0, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    with create() as tier:
        tier.store(ids(4), keys, values)
        got = [torch.empty(1, B, H, D), torch.empty(1, B, H, D)]
        tier.load(0, ids(4), *got)
        assert torch.equal(got[0].view(torch.int32), keys[0].view(torch.int32))


def test_a_refused_int8_block_leaves_the_others_alone():
    keys, values = kv(2)
    with create(format="int8") as tier:
        tier.store(ids(0, 1), keys, values)
        before = tier.checksum(0)
        values[1, 0, 2, 1, 3] = torch.inf
        with pytest.raises(HostTierError, match="NaN, inf"):
            tier.store(ids(1), keys[:, :1], values[:, :1])
        assert tier.checksum(0) == before


def test_modes_of_autograd_do_not_matter():
    with torch.inference_mode():
        tier = create()
        keys, values = kv(2)
    tier.store(ids(0, 1), keys, values)  # outside, with tensors made inside
    with torch.inference_mode():
        tier.store(ids(2, 3), *kv(2))
        assert tier.checksum(0) == tier.checksum(2)
    tier.close()


def test_nothing_to_do_is_done():
    with create() as tier:
        empty = torch.empty(0, B, H, D)
        tier.store(ids(), *kv(0))
        tier.load(0, ids(), empty, empty)
        tier.load_into(0, ids(), ids(), torch.zeros(3, B, H, D), torch.zeros(3, B, H, D))


def test_runs():
    assert list(runs([7, 8, 9, 4])) == [(0, 3), (3, 4)]
    assert list(runs([7, 8, 9, 4], [1, 2, 4, 5])) == [(0, 2), (2, 3), (3, 4)]
    assert list(runs([3, 2, 1])) == [(0, 1), (1, 2), (2, 3)]
    assert list(runs([])) == []


# --- size -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["auto", "int8"])
def test_size_counts_everything_and_fits_the_memory_given(fmt):
    per_block = {"auto": 2 * L * B * H * D * 4, "int8": L * H * (2 * B * D + 2 * D + 2 * B)}[fmt]
    memory = 2**20
    count = num_blocks_for(memory, CONFIG, B, torch.float32, fmt)
    with create(count, format=fmt) as tier:
        assert tier.bytes_per_block == per_block and tier.num_blocks == count
        assert count * per_block <= tier.nbytes <= memory < tier.nbytes + per_block
        assert tier.format == ("float32" if fmt == "auto" else "int8")
        order = torch.arange(count)
        tier.store(order, *kv(count))
        assert len({tier.checksum(b) for b in range(count)}) == count  # no two blocks share a byte
    with pytest.raises(HostTierError, match="holds no block: one needs"):
        num_blocks_for(1000, CONFIG, B, torch.float32, fmt)


def test_untouched_pages_cost_nothing_and_stores_do_not_grow():
    big = kv(1300)
    before = rss()
    with create(num_blocks_for(2**30, CONFIG, B, torch.float32)) as tier:
        assert tier.nbytes > 2**30 - 2**20 and rss() - before < 2**24
    with create(64, format="int8") as tier:
        keys, values = kv(8)
        out = [torch.empty(8, B, H, D), torch.empty(8, B, H, D)]
        for i in range(1000):
            order = (torch.arange(8) * 7 + i) % 64
            tier.store(order, keys, values)
            tier.load(i % L, order, *out)
            if i == 100:
                warm = rss()
        assert rss() < warm * 1.05
    for _ in range(20):  # 20 tiers of 4 MB, one after the other
        with create(1300) as tier:
            tier.store(torch.arange(1300), *big)
    assert rss() < warm + 4 * 2**20


def test_more_than_the_machine_has_is_refused_at_once():
    with pytest.raises(HostTierError, match=r"does not fit this machine's .* lower --host-kv-memory"):
        create(2**40)


# --- misuse -----------------------------------------------------------------------------------------
def test_misuse_is_refused_by_name():
    keys, values = kv(2)
    with create() as tier:
        out = [torch.empty(2, B, H, D), torch.empty(2, B, H, D)]
        for bad in (ids(0, 12), ids(-1, 3)):
            for call in (
                lambda b: tier.store(b, keys, values),
                lambda b: tier.load(0, b, *out),
                lambda b: tier.load_into(0, b, ids(0, 1), *out),
            ):
                with pytest.raises(HostTierError, match=r"not all within 0\.\.11"):
                    call(bad)
        with pytest.raises(HostTierError, match=r"expected \[3, 2, 4, 2, 16\] of torch.float32"):
            tier.store(ids(0, 1), keys[:, :, :, :1], values)
        with pytest.raises(HostTierError, match=r"got .* of torch.float16"):
            tier.store(ids(0, 1), keys.half(), values)
        with pytest.raises(HostTierError, match="tensors to load into"):
            tier.load(0, ids(0, 1), *out, heads=slice(0, 1))
        with pytest.raises(HostTierError, match="one slot per block"):
            tier.load_into(0, ids(0, 1), ids(0), *out)
    with pytest.raises(HostTierError, match="closed"):
        tier.store(ids(0, 1), keys, values)
    tier.close()  # twice is fine
    with pytest.raises(HostTierError, match="at least 1"):
        create(0)
    with pytest.raises(HostTierError, match="'fp4'"):
        create(format="fp4")


# --- threads ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["auto", "int8"])
def test_stores_beside_loads_of_other_blocks(fmt):
    """One thread stores 1,000 blocks; another loads blocks sealed before and finds what was stored."""
    with create(200, format=fmt) as tier:
        sealed, moving = torch.arange(0, 200, 2), torch.arange(1, 200, 2)
        keys, values = kv(100, seed=1)
        tier.store(sealed, keys, values)
        sums = [tier.checksum(b) for b in sealed.tolist()]
        truth = [torch.empty(L, 100, B, H, D) for _ in range(2)]
        for layer in range(L):
            tier.load(layer, sealed, truth[0][layer], truth[1][layer])
        source = kv(100, seed=2)
        failures: list[BaseException] = []

        def write() -> None:
            try:
                for i in range(1000):
                    j = i % 100
                    tier.store(moving[j : j + 1], source[0][:, j : j + 1], source[1][:, j : j + 1])
            except BaseException as error:
                failures.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        loads, pool = 0, [torch.empty(100, B, H, D) for _ in range(2)]
        while writer.is_alive() or loads < 50:
            layer, pick = loads % L, torch.randperm(100)[:20]
            tier.load_into(layer, sealed[pick], pick, *pool)
            for got, want in zip(pool, truth, strict=True):
                assert torch.equal(got[pick], want[layer, pick])
            loads += 1
        writer.join()
        assert not failures
        assert [tier.checksum(b) for b in sealed.tolist()] == sums
        with create(100, format=fmt) as alone:
            alone.store(torch.arange(100), *source)
            expected = [alone.checksum(b) for b in range(100)]
        assert [tier.checksum(b) for b in moving.tolist()] == expected


@pytest.mark.parametrize("fmt", ["auto", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_head_groups_of_different_blocks_load_as_one_by_one(dtype, fmt) -> None:
    with create(dtype=dtype, format=fmt) as tier:
        tier.store(torch.arange(12), *kv(12, dtype))
        blocks, groups, slots = ids(2, 3, 3, 11), torch.arange(4) % H, ids(4, 0, 7, 5)
        pools = torch.full((2, 8, B, 1, D), -7.0, dtype=dtype)
        tier.load_groups(1, blocks, groups, slots, *pools)
        for i, slot in enumerate(slots.tolist()):
            want = torch.empty(2, 1, B, 1, D, dtype=dtype)
            heads = slice(int(groups[i]), int(groups[i]) + 1)
            tier.load(1, blocks[i : i + 1], *want, heads=heads)
            assert torch.equal(pools[:, slot], want[:, 0])
        assert (pools[:, [1, 2, 3, 6]] == -7).all()
        with pytest.raises(HostTierError, match="block ids"):
            tier.load_groups(1, ids(12), ids(0), ids(0), *pools)
