"""Parts of drafts on tiny models: chains, calibration, layers, the draft model, options that do not fit."""

import json
import shutil

import pytest
import torch
from draft_fakes import model_draft, row_of
from make_tokenizers import write_bpe_folder
from oasis_engines import (
    GREEDY,
    LIMIT,
    model_of,
    prompts_of,
)

from nano_oasis import LLM
from nano_oasis.config import ConfigError, EngineConfig
from nano_oasis.request import Request, RequestError, SamplingParams
from nano_oasis.spec.calibrate import calibrate, read_layers, save_layers
from nano_oasis.spec.chain import Calibration, Chains
from nano_oasis.spec.draft import Chance
from nano_oasis.spec.self_draft import format_layers, parse_layers


def test_chains_stop_where_a_token_is_not_likely_enough():
    request = Request([1, 2, 3], GREEDY, 100, 0, output_ids=[4])
    sure = [0.9, 0.8, 0.5, 0.9]

    def step(going, tokens, done):
        return tokens + 1, torch.tensor([sure[done]] * len(going))

    chains = Chains()
    assert chains.draft([row_of(request, 4)], step) == [[5, 6, 7, 8]]
    assert chains.draft([row_of(request, 4, price=0.5)], step) == [[5, 6]]  # 0.94 * 0.81 * 0.56 is less
    assert chains.draft([row_of(request, 4, price=0.95)], step) == [[]]
    assert chains.draft([row_of(request, 2)], step) == [[5, 6]]


def test_calibration_learns_the_chance_of_each_confidence():
    calibration = Calibration()
    assert calibration.chance(0.9) > 0.8 > 0.3 > calibration.chance(0.1)
    for _ in range(300):
        calibration.learn([0.9, 0.9], 0)  # the second is unknown
        calibration.learn([0.3, 0.35, 0.32], 3)
    assert calibration.chance(0.9) < 0.05 and calibration.chance(0.33) > 0.95
    assert calibration.chance(0.6) == pytest.approx(9 / 16)
    chance = Chance()
    for _ in range(50):
        chance.learn(1, 3)  # one right, one wrong, one unknown
    assert chance.value == pytest.approx(0.5, abs=1e-3) and chance.worth(4, 0.3) == 1


def test_layers_are_parsed_calibrated_and_kept(folders, tmp_path):
    assert parse_layers("0-2,5, 7-7", 8) == [0, 1, 2, 5, 7] and format_layers([0, 1, 2, 5, 7]) == "0-2,5,7"
    for bad in ("", "3-1", "2,2", "0-8", "x", "1--2", "5,3"):
        with pytest.raises(ValueError, match="layer"):
            parse_layers(bad, 8)
    model = model_of(folders["llama"])
    found = calibrate(model, model.config.vocab_size)
    assert 0 < len(found.layers) < model.config.num_layers and 0 <= found.right <= 1
    path = tmp_path / "layers.json"
    save_layers(path, found, model)
    assert read_layers(path, model) == found.layers
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weight_bytes": 1}))
    with pytest.raises(ConfigError, match="another model"):
        read_layers(path, model)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="not a file of calibration"):
        read_layers(path, model)


def test_the_draft_model_catches_up_with_long_prompts_in_pieces(folders, monkeypatch):
    monkeypatch.setattr("nano_oasis.spec.model_draft.CATCH_UP", 16)
    model = model_of(folders["llama"])
    draft = model_draft(model)
    request = Request(prompts_of([50])[0], GREEDY, LIMIT, 0, output_ids=[7])
    found = [draft.propose([row_of(request, 3)])[0] for _ in range(5)]
    assert [len(f) for f in found] == [0, 0, 0, 3, 3]
    request.output_ids = [7, found[3][0], (found[3][1] + 1) % 60]  # the second draft was wrong
    draft.propose([row_of(request, 3)])
    fresh = model_draft(model)
    monkeypatch.setattr("nano_oasis.spec.model_draft.CATCH_UP", 512)
    assert fresh.propose([row_of(request, 3)]) == draft.propose([row_of(request, 3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "best"}, "draft: must be one of"),
        ({"num_draft_tokens": 3}, "num_draft_tokens: needs a draft"),
        ({"draft": "ngram", "num_draft_tokens": 17}, "between 1 and 16"),
        ({"draft": "model"}, "draft_model"),
        ({"draft": "ngram", "draft_head": "x"}, "draft_head: needs draft=head or auto"),
        ({"draft": "head", "draft_layers": "0-3"}, "draft_layers: needs draft=self"),
        ({"kv_mode": "lossless", "host_kv_format": "int8"}, "lossless needs auto"),
        ({"selector": "mean"}, "needs kv_mode=oasis or lossless"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_drafts_of_another_vocabulary_and_layers_that_are_not_there_are_refused(folders, tmp_path):
    write_bpe_folder(folders["llama"])
    write_bpe_folder(folders["gemma3"])
    small = {"max_model_len": 64, "num_device_blocks": 16}
    with pytest.raises(ConfigError, match="layers must rise"):
        LLM(str(folders["llama"]), draft="self", draft_layers="0-99", **small)
    other = shutil.copytree(folders["llama"], tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]
    (other / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"draft_model: token \d+ is '[QZ]' in its vocabulary and '[QZ]'"):
        LLM(str(folders["llama"]), draft="model", draft_model=str(other), **small)
    with pytest.raises(ConfigError, match="draft_model: model 'nothing'"):
        LLM(str(folders["llama"]), draft="model", draft_model="nothing", **small)
    with pytest.raises(ConfigError, match=r"draft_layers: .* there is no folder"):
        LLM(str(folders["llama"]), draft="self", draft_layers=str(tmp_path / "no" / "f.json"), **small)
    (tmp_path / "odd.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="not a file of calibration: it has no 'of'"):
        LLM(str(folders["llama"]), draft="self", draft_layers=str(tmp_path / "odd.json"), **small)
    with pytest.raises(ConfigError, match=r"draft head .*odd.json: damaged"):  # auto takes one
        LLM(str(folders["llama"]), draft="auto", draft_head=str(tmp_path / "odd.json"), **small)
    with pytest.raises(ConfigError, match="no built-in head"):
        LLM(str(folders["llama"]), draft="head", **small)
    with LLM(str(folders["llama"]), draft="self", draft_layers=str(tmp_path / "found.json"), **small) as llm:
        plain = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert (tmp_path / "found.json").exists()
    with LLM(str(folders["llama"]), draft="model", draft_model=str(folders["llama"]), **small) as llm:
        again = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
        assert again[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="kv_mode=lossless needs an engine"):
            llm.generate("a", SamplingParams(kv_mode="lossless"))
