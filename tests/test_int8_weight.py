"""Linear layers in eight bits: the encoding, its products, and a model that has them.

Owns: these checks. Must not know: how good a real model is with them (docs/04-weights.md).
"""

from __future__ import annotations

import pytest
import torch

from nano_oasis import LLM, ConfigError, SamplingParams
from nano_oasis.kernels import linear as module
from nano_oasis.kernels.int8_weight import Int8Weight
from nano_oasis.kernels.linear import linear
from nano_oasis.model import Model
from nano_oasis.weights import load_checkpoint


def test_each_weight_is_within_half_a_step_of_its_row() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 64) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0
    coded = Int8Weight.of(weight)
    assert coded.codes.dtype == torch.int8 and int(coded.codes.min()) >= -127
    assert ((coded[:] - weight).abs() <= coded.scales[:, None] * 0.5001).all()
    assert (coded[:][7] == 0).all() and (coded.codes.abs().amax(1)[coded.scales > 0] == 127).all()
    assert torch.equal(coded[torch.tensor([3, 30])], coded[:][[3, 30]])
    assert coded.nbytes == 40 * 64 + 40 * 4 and coded.shape == (40, 64)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 14, 32, 33, 200])
@pytest.mark.parametrize("shape", [(4, 16), (576, 64), (1028, 48), (7, 16), (8, 20)])
def test_products_equal_those_of_the_decoded_weights(rows, shape, compiled, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(module, "numba_works", lambda: False)
    torch.manual_seed(rows)
    coded, bias, x = Int8Weight.of(torch.randn(shape)), torch.randn(shape[0]), torch.randn(rows, shape[1])
    want = x.double() @ coded[:].double().T
    for got, truth in ((linear(x, coded), want), (linear(x, coded, bias), want + bias)):
        assert got.is_contiguous() and got.dtype == torch.float32 and got.shape == truth.shape
        torch.testing.assert_close(got.double(), truth, atol=2e-6 * shape[1], rtol=1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    pytest.importorskip("numba")
    coded, x = Int8Weight.of(torch.randn(128, 576)), torch.randn(32, 576)
    alone = torch.cat([linear(row[None], coded) for row in x])
    for rows in (2, 3, 5, 11, 32):
        assert torch.equal(linear(x[:rows], coded), alone[:rows])


def test_a_model_keeps_its_embedding_and_encodes_every_linear_layer(folder) -> None:
    def load(int8: bool) -> Model:
        checkpoint = load_checkpoint(folder, torch.float32, "cpu")
        return Model(checkpoint.config, checkpoint.tensors, 64, int8)

    plain, coded = load(False), load(True)
    assert torch.equal(plain.embed, coded.embed) and plain.num_weights == coded.num_weights
    assert coded.weight_bytes < 0.3 * plain.weight_bytes
    for a, b in zip(plain.layers, coded.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            matrix = getattr(b, name)
            assert isinstance(matrix, Int8Weight)
            torch.testing.assert_close(matrix[:], Int8Weight.of(getattr(a, name))[:])
    assert isinstance(coded.lm_head, Int8Weight)


def test_an_engine_serves_with_it_the_same_in_every_mode_and_with_drafts(folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["The sun rises in the east", "one two one two one two one"]
    outputs = []
    for options in ({}, {"draft": "ngram", "num_draft_tokens": 3}, {"kv_mode": "lossless"}):
        with LLM(str(folder), weights="int8", max_model_len=128, max_num_seqs=4, **options) as llm:
            outputs.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1] == outputs[2]


def test_it_is_refused_where_it_would_not_be_used(folder) -> None:
    with pytest.raises(
        ConfigError, match=r"weights: int8 needs device=cpu and dtype=float32; got cpu and bf"
    ):
        LLM(str(folder), weights="int8", dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights"):
        LLM(str(folder), weights="int3")
