"""memory/sketch.py: every selector against its definition written as loops, its bytes, and the choice."""

import math

import pytest
import torch

from nano_oasis.memory.sketch import SELECTORS, make_selector, pack, per_layer, top_blocks, unpack

ROWS, BLOCKS, SIZE, HEADS, GROUP, DIM = 3, 7, 4, 2, 3, 16
SCALE = 0.3
NAMES = list(SELECTORS)


def keys_and_queries(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(BLOCKS, SIZE, HEADS, DIM, generator=g) * 2
    keys[..., 3] += 9  # keys after rope have channels like this
    return keys, torch.randn(ROWS, HEADS * GROUP, DIM, generator=g)


def f16(x: float) -> float:
    return torch.tensor(x).half().item()


def estimated_keys(name: str, block: torch.Tensor) -> torch.Tensor:
    """block [B, D], one head -> what the sketch takes for its keys [m, D]; m = 1 for a mean."""
    size, dim = block.shape
    out = torch.zeros(size, dim)
    if name == "mean":
        return block.mean(0, keepdim=True).half().float()
    for t in range(size):
        for c in range(dim):
            x, channel, token = block[t, c].item(), block[:, c], block[t]
            if name == "exact":
                out[t, c] = x
            elif name == "sign1":
                mean = channel.mean().item()
                distance = (channel - mean).abs().mean().item()
                out[t, c] = f16(mean - distance) + (f16(2 * distance) if x > mean else 0.0)
            else:
                line, most = {"twobit": (channel, 3), "fourbit": (token, 15)}[name]
                base = f16(line.min().item())
                step = f16((line.max().item() - base) / most)
                out[t, c] = base + step * min(max(round((x - base) / step), 0), most)
    return out


def expected_logit(name: str, q: torch.Tensor, block: torch.Tensor) -> float:
    if name == "minmax":
        low, high = block.amin(0).half().float(), block.amax(0).half().float()
        return sum(max((q[c] * low[c]).item(), (q[c] * high[c]).item()) for c in range(len(q)))
    if name == "fourbit":  # base times the query's sum is exact, the codes meet the query in 8 bits
        step = float(q.abs().max()) / 127
        rounded = torch.tensor([round(float(x) / step) * step for x in q])
        base = block.amin(1, keepdim=True).half().float()
        keys = torch.stack(list(estimated_keys(name, block)))
        dots = [float(base[t] * q.sum() + rounded @ (keys[t] - base[t])) for t in range(len(keys))]
    else:
        dots = [float(q @ k) for k in estimated_keys(name, block)]
    return math.log(sum(math.exp(d) for d in dots))


def gather(sketch: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {k: x[ids] for k, x in sketch.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_follow_the_definition(name):
    keys, q = keys_and_queries()
    selector = make_selector(name)
    got = selector.logits(q * SCALE, gather(selector.build(keys), torch.arange(BLOCKS)[None]))
    assert got.shape == (ROWS, HEADS * GROUP, BLOCKS)
    for r in range(ROWS):
        for h in range(HEADS * GROUP):
            for b in range(BLOCKS):
                want = expected_logit(name, q[r, h] * SCALE, keys[b, :, h // GROUP])
                assert got[r, h, b].item() == pytest.approx(want, abs=2e-4), (r, h, b)


@pytest.mark.parametrize("name", NAMES)
def test_score_is_the_mean_of_softmaxes_and_rows_may_see_different_blocks(name):
    keys, q = keys_and_queries(1)
    selector = make_selector(name)
    sketch = selector.build(keys)
    ids = torch.stack(
        [torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(r)) for r in range(ROWS)]
    )
    got = selector.score(q, gather(sketch, ids), SCALE)
    assert got.shape == (ROWS, HEADS, BLOCKS)
    torch.testing.assert_close(got.sum(-1), torch.ones(ROWS, HEADS))
    shared = selector.score(q, gather(sketch, torch.arange(BLOCKS)[None]), SCALE)
    for r in range(ROWS):
        torch.testing.assert_close(got[r], shared[r][:, ids[r]], atol=1e-5, rtol=1e-4)
        for h in range(HEADS):
            logits = torch.tensor(
                [
                    [expected_logit(name, q[r, g] * SCALE, keys[b, :, h]) for b in range(BLOCKS)]
                    for g in range(h * GROUP, (h + 1) * GROUP)
                ]
            )
            torch.testing.assert_close(shared[r, h], logits.softmax(-1).mean(0), atol=1e-3, rtol=1e-3)
    assert torch.equal(per_layer(shared), shared.mean(1, keepdim=True))


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_never_seen(name):
    keys, q = keys_and_queries(2)
    selector = make_selector(name)
    sketch = gather(selector.build(keys), torch.arange(BLOCKS).expand(ROWS, -1))
    valid = torch.ones(ROWS, BLOCKS, dtype=torch.bool)
    valid[0, 4:] = False
    valid[1] = False
    clean = selector.score(q, {k: x[:, :4] for k, x in sketch.items()}, SCALE)[0]
    for x in sketch.values():
        x[~valid] = torch.nan if x.is_floating_point() else 255
    got = selector.score(q, sketch, SCALE, valid)
    torch.testing.assert_close(got[0, :, :4], clean)
    assert not got[0, :, 4:].any() and not got[1].any()
    torch.testing.assert_close(got[2].sum(-1), torch.ones(HEADS))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_per_block_are_the_tensors_bytes(name, size, dim):
    sketch = make_selector(name).build(torch.randn(5, size, 3, dim))
    assert all(len(x) == 5 and x.shape[1] == 3 and x.is_contiguous() for x in sketch.values())
    assert sum(x.nbytes for x in sketch.values()) == 5 * make_selector(name).bytes_per_block(size, 3, dim)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_keys_and_every_dtype_give_finite_masses(name, dtype):
    keys = torch.full((BLOCKS, SIZE, HEADS, DIM), 2.5, dtype=dtype)
    selector = make_selector(name)
    sketch = gather(selector.build(keys), torch.arange(BLOCKS)[None])
    got = selector.score(torch.ones(1, HEADS, DIM, dtype=dtype), sketch, 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.full((1, HEADS, BLOCKS), 1 / BLOCKS))


@pytest.mark.parametrize(("name", "steps"), [("twobit", 3), ("fourbit", 15)])
def test_a_key_is_kept_to_half_a_step(name, steps):
    keys, _ = keys_and_queries(3)
    one = (
        keys[:, :1] if name == "fourbit" else keys
    )  # a block of one token shows its key through unit queries
    selector = make_selector(name)
    if name == "fourbit":
        unit = torch.eye(DIM).repeat_interleave(HEADS, 0).view(DIM, HEADS, DIM)
        logits = selector.logits(unit, gather(selector.build(one), torch.arange(BLOCKS)[None]))
        got = logits.permute(2, 1, 0)  # [n, H, D]
        want = one[:, 0]
        step = (want.amax(-1, keepdim=True) - want.amin(-1, keepdim=True)) / steps
    else:
        sketch = selector.build(one)
        got = sketch["base"].float()[..., None] + sketch["step"].float()[..., None] * unpack(
            sketch["codes"], 2
        )
        want = one.permute(0, 2, 3, 1)
        step = (want.amax(-1, keepdim=True) - want.amin(-1, keepdim=True)) / steps
    assert ((got - want).abs() <= step / 2 + 0.02).all()
    assert ((got - want).abs() > step / 20).any(), "the sketch would be exact"


def test_minmax_bounds_every_key_from_above():
    keys, q = keys_and_queries(4)
    selector = make_selector("minmax")
    bound = selector.logits(q, gather(selector.build(keys), torch.arange(BLOCKS)[None]))
    true = torch.einsum("rhgd,nthd->rhgnt", q.view(ROWS, HEADS, GROUP, DIM), keys).amax(-1).flatten(1, 2)
    assert (bound >= true - 0.05).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "mean"])
def test_one_loud_key_among_quiet_ones_is_found(name):
    g = torch.Generator().manual_seed(5)
    keys = torch.randn(64, 16, 1, 64, generator=g)
    q = torch.randn(1, 1, 64, generator=g)
    keys[41, 7, 0] = q[0, 0] * 1.5
    selector = make_selector(name)
    mass = selector.score(q, gather(selector.build(keys), torch.arange(64)[None]), 64**-0.5)
    assert mass.argmax().item() == 41


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_pack_and_unpack(bits):
    codes = torch.randint(0, 2**bits, (5, 2, 16, 4), generator=torch.Generator().manual_seed(6))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (5, 2, 2 * bits, 4)
    assert torch.equal(unpack(packed, bits), codes.float())


def test_a_head_size_that_does_not_fill_bytes_is_refused():
    with pytest.raises(ValueError, match=r"3 channels .* multiple of 4"):
        make_selector("twobit").build(torch.randn(1, 4, 1, 3))


def test_unknown_selector_is_named():
    with pytest.raises(ValueError, match=r"'quest'.*fourbit"):
        make_selector("quest")


def test_top_blocks_forced_first_then_by_mass():
    mass = torch.tensor([[[0.1, 0.5, 0.2, 0.15, 0.05]], [[0.3, 0.3, 0.2, 0.1, 0.1]]])
    forced = torch.tensor([[False, False, False, False, True], [True, False, False, False, False]])
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    ids = top_blocks(mass, 3, forced, valid)
    assert ids.tolist() == [[[4, 1, 2]], [[0, 1, -1]]]
    assert top_blocks(mass, 9, forced).shape == (2, 1, 5), "no more blocks than there are"
    forced[1, 3] = True  # forced, but padding
    assert top_blocks(mass, 3, forced, valid)[1].tolist() == [[0, 1, -1]]
