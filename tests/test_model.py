"""model.py and rope.py against transformers: every family, safetensors and GGUF, chunks and batches."""

import math

import pytest
import torch
from make_checkpoints import FAMILIES, hf_to_gguf, make_hf

from nano_oasis.config import ConfigError, RopeConfig
from nano_oasis.kernels.batch import make_batch
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.dense_kv import DenseView
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.model import Model
from nano_oasis.rope import rope_frequencies, rope_table
from nano_oasis.weights import load_checkpoint

B = 8
KERNELS = select_kernels("cpu")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
VARIANTS = [
    *[(f, {}) for f in FAMILIES],
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": LINEAR}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 20}),
    ("qwen3", {"attention_bias": True}),
]
# llama.cpp has no name for the tensors of these, so no such GGUF exists.
CASES = [("safetensors", *v) for v in VARIANTS]
CASES += [("gguf", *v) for v in VARIANTS if "attention_bias" not in v[1]]


def forward(model: Model, cache: KVCache, sequences, chunk: int) -> list[torch.Tensor]:
    """Logits of every position of every sequence, computed `chunk` tokens of each at a time, in one batch."""
    tables, start = [], 0
    for s in sequences:
        need = -(-len(s) // B)
        tables.append(list(range(start, start + need))[::-1])  # scattered: blocks in descending order
        start += need
    out: list[list[torch.Tensor]] = [[] for _ in sequences]
    for at in range(0, max(map(len, sequences)), chunk):
        rows = [(i, at, min(chunk, len(s) - at)) for i, s in enumerate(sequences) if at < len(s)]
        rows.sort(key=lambda r: r[2] != 1)
        batch = make_batch([(tables[i], a, n) for i, a, n in rows], B)
        ids = torch.cat([sequences[i][a : a + n] for i, a, n in rows])
        positions = torch.cat([torch.arange(a, a + n) for _, a, n in rows])
        logits = model.logits(model.forward(ids, positions, DenseView(cache, batch, KERNELS)))
        for (i, _, _), part in zip(rows, logits.split([n for _, _, n in rows]), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


def load(path, max_len: int) -> tuple[Model, KVCache]:
    checkpoint = load_checkpoint(path, torch.float32)
    model = Model(checkpoint.config, checkpoint.tensors, max_len)
    cache = KVCache.allocate(checkpoint.config, 96, B, torch.float32, "cpu")
    cache.keys.fill_(torch.nan)  # nothing may be read that was not written
    cache.values.fill_(torch.nan)
    return model, cache


@pytest.mark.parametrize(("kind", "family", "overrides"), CASES, ids=lambda v: str(v)[:60])
def test_logits_equal_transformers(kind, family, overrides, tmp_path):
    hf = make_hf(family, tmp_path / "hf", **overrides)
    path = tmp_path / "hf" if kind == "safetensors" else hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    model, cache = load(path, 4096)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, 128, (n,), generator=generator) for n in (1, 7, 300, 33)]
    with torch.inference_mode():
        expected = [hf(s[None]).logits[0] for s in sequences]
    for chunk in (512, 50, 8):
        got = forward(model, cache, sequences, chunk)
        for a, b in zip(got, expected, strict=True):
            assert b.std() > 0.5, "the fixture's logits must differ from one another"
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    decode = forward(model, cache, [sequences[3], sequences[1]], 1)
    torch.testing.assert_close(decode[0], expected[3], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(decode[1], expected[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("position", [0, 1000, 8192, 20000])
def test_B067_rope_tables_follow_the_formulas(position):
    d, theta = 16, 10000.0
    plain = [theta ** (-2 * i / d) for i in range(d // 2)]
    table = rope_table(RopeConfig(theta), d, 20001)[position]
    for i, f in enumerate(plain):
        assert table[0, i].item() == pytest.approx(math.cos(position * f), abs=2e-3)
        assert table[1, i + d // 2].item() == pytest.approx(math.sin(position * f), abs=2e-3)
    linear, scale = rope_frequencies(RopeConfig(theta, "linear", 4.0), d)
    assert linear.tolist() == pytest.approx([f / 4 for f in plain]) and scale == 1.0
    llama3, _ = rope_frequencies(RopeConfig(theta, "llama3", 8.0, 256), d)
    for f, got in zip(plain, llama3.tolist(), strict=True):
        wave = 2 * math.pi / f
        if wave < 256 / 4:
            expected = f
        elif wave > 256:
            expected = f / 8
        else:
            smooth = (256 / wave - 1) / 3
            expected = (1 - smooth) * f / 8 + smooth * f
        assert got == pytest.approx(expected, rel=1e-5)


def test_B067_yarn_scales_attention_and_interpolates_slow_dimensions():
    freqs, scale = rope_frequencies(RopeConfig(10000.0, "yarn", 4.0, 4096), 64)
    plain, _ = rope_frequencies(RopeConfig(10000.0), 64)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)
    assert freqs[0] == plain[0] and freqs[-1].item() == pytest.approx(plain[-1].item() / 4)
    _, given = rope_frequencies(RopeConfig(10000.0, "yarn", 4.0, 4096, attention_factor=1.5), 64)
    assert given == 1.5


def test_B067_unknown_rope_type_is_refused():
    with pytest.raises(ConfigError, match="'ntk'"):
        rope_frequencies(RopeConfig(10000.0, "ntk"), 16)


def test_leftover_tensors_are_refused(tmp_path):
    make_hf("llama", tmp_path)
    checkpoint = load_checkpoint(tmp_path, torch.float32)
    checkpoint.tensors["layers.0.surprise"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"layers\.0\.surprise"):
        Model(checkpoint.config, checkpoint.tensors, 64)
