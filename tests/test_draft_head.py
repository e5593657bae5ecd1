"""The draft head: its arithmetic and file, its training, and the one in the package."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from make_checkpoints import make_hf
from make_tokenizers import CHATML, CORPUS, write_bpe_folder
from oasis_engines import dense_engine, model_of
from safetensors.torch import load_file, save_file

from nano_oasis.config import ConfigError
from nano_oasis.kernels.packed_weight import PackedWeight
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.spec import fit, measure, train
from nano_oasis.spec.head import EPS, DraftHead, head_path, read_config
from nano_oasis.spec.prompts import HELD_EVERY, PromptMaker, read_documents, topics
from nano_oasis.spec.recording import Recorder, load_recordings
from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.weights import load_checkpoint

OPTIONS = ["--tokens", "900", "--max-new-tokens", "12", "--steps", "10", "--batch", "4", "--inner", "32",
           "--vocab", "128", "--threads", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny chat model, and texts beside it."""
    path = tmp_path_factory.mktemp("tiny")
    make_hf("llama", path, vocab_size=640)
    write_bpe_folder(path, chat_template=CHATML)
    texts = path / "texts"
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text(f"Text {i}.\n{CORPUS}")
    return path


def command(folder, output, *more):
    return ["--model", str(folder), "--data", str(folder / "texts"), "--output", str(output), *OPTIONS, *more]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The head of an uninterrupted run of two shards; its work folder is beside it."""
    output = tmp_path_factory.mktemp("head") / "tiny.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SHARD", train.FEWEST)
        assert train.main(command(folder, output)) == 0
    return output


def work_of(output):
    return output.with_name(output.name + ".work")


# --- the head ------------------------------------------------------------------------------------------


def twin(path, model, state, tokens):
    """step() in plain torch, from the file alone."""
    w = {n: t.float() for n, t in load_file(path).items()}

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    embedded = model.embed.float()[tokens]
    h = state + torch.cat([norm(state, w["norm_state"]), norm(embedded, w["norm_token"])], 1) @ w["fc"].T
    for i in range(2):
        gate_up = norm(h, w[f"blocks.{i}.norm"]) @ w[f"blocks.{i}.gate_up"].T
        h = h + (F.silu(gate_up[:, :32]) * gate_up[:, 32:]) @ w[f"blocks.{i}.down"].T
    state = norm(h, w["norm_out"])
    logits = state @ model.lm_head.float()[w["draft_ids"].long()].T
    confidence, at = logits.softmax(1).max(1)
    return state, w["draft_ids"].long()[at], confidence


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_step_equals_plain_torch(folder, trained, rows):
    model = model_of(folder)
    head = DraftHead.load(trained, model)
    state, tokens = torch.randn(rows, 64), torch.randint(0, 640, (rows,))
    for _ in range(3):
        expected = twin(trained, model, state, tokens)
        state, tokens, confidence = head.step(state, tokens)
        assert state.dtype == confidence.dtype == torch.float32 and tokens.dtype == torch.int64
        torch.testing.assert_close(state, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(confidence, expected[2], rtol=1e-3, atol=1e-5)
        assert torch.equal(tokens, expected[1])


def test_a_step_in_bfloat16(folder, trained):
    checkpoint = load_checkpoint(folder, torch.bfloat16)
    head = DraftHead.load(trained, Model(checkpoint.config, checkpoint.tensors, 64))
    state, tokens = torch.randn(5, 64), torch.arange(5)
    expected, _, confidence = twin(trained, model_of(folder), state, tokens)
    got = head.step(state, tokens)
    assert got[0].dtype == got[2].dtype == torch.float32
    assert F.cosine_similarity(got[0], expected).min() > 0.999
    torch.testing.assert_close(got[2], confidence, rtol=0.1, atol=0.01)


def test_the_file_says_what_it_is(folder, trained):
    config, about = read_config(trained)
    assert (config.hidden, config.inner, config.blocks, config.vocab) == (64, 32, 2, 128)
    assert about["vocab_size"] == 640 and about["recipe"]["steps"] == 10 and about["written"] > 700
    figures = about["acceptance"]["all"]
    assert figures["steps"] > 0 and figures["per_step"] >= 1 and len(figures["accepted"]) == 4
    held = [t for f in work_of(trained).glob("shard*") for t in load_recordings(f) if t.held]
    assert figures == measure.acceptance(DraftHead.load(trained, model_of(folder)), held)


def test_the_same_model_in_another_format_is_known(folder, trained):
    """Four bits in groups of 32, as Q4_0 has them; and --weights int8."""
    checkpoint = load_checkpoint(folder, torch.float32)
    for name, weight in checkpoint.tensors.items():
        if weight.ndim == 2 and weight.shape[1] % 32 == 0:
            groups = weight.unflatten(1, (-1, 32))
            step = groups.abs().amax(-1, keepdim=True) / 7
            checkpoint.tensors[name] = ((groups / step).round() * step).flatten(1)
    coarse = Model(checkpoint.config, checkpoint.tensors, 64)
    assert not torch.equal(coarse.embed, model_of(folder).embed)
    DraftHead.load(trained, coarse)
    checkpoint = load_checkpoint(folder, torch.float32, matrices="int8")
    head = DraftHead.load(trained, Model(checkpoint.config, checkpoint.tensors, 64, checkpoint.dtype))
    assert isinstance(head.rows, PackedWeight) and len(head.rows) == 128


def test_another_model_is_refused(folder, trained, tmp_path):
    make_hf("llama", tmp_path / "a", vocab_size=640, seed=1)
    with pytest.raises(ConfigError, match="another model of the same size"):
        DraftHead.load(trained, model_of(tmp_path / "a"))
    make_hf("llama", tmp_path / "b", vocab_size=512)
    with pytest.raises(ConfigError, match="hidden size 64 and 640 tokens; this one has 64 and 512"):
        DraftHead.load(trained, model_of(tmp_path / "b"))
    assert head_path(model_of(folder)) is None  # nothing in the package is for this model


def test_damaged_files_are_refused(folder, trained, tmp_path):
    model, path = model_of(folder), tmp_path / "head.safetensors"
    whole = trained.read_bytes()
    tensors = load_file(trained)
    metadata = {"format": "nano_oasis draft head 1", "head": json.dumps(read_config(trained)[1])}

    def refused(match):
        with pytest.raises(ConfigError, match=match):
            DraftHead.load(path, model)

    refused("No such file")
    for size in (0, 4, 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused("head.safetensors")
    save_file(tensors, path)
    refused("not a file of")
    save_file(tensors, path, metadata | {"head": '{"hidden": 64}'})
    refused("damaged")
    save_file({n: t for n, t in tensors.items() if n != "fc"}, path, metadata)
    refused("fc is None")
    save_file(tensors | {"fc": torch.full_like(tensors["fc"], torch.nan)}, path, metadata)
    refused("fc holds a value that is not a number")
    save_file(tensors | {"draft_ids": tensors["draft_ids"] + 640}, path, metadata)
    refused("draft_ids are not tokens")
    path.write_bytes(whole)
    DraftHead.load(path, model)


# --- prompts and recordings ----------------------------------------------------------------------------


def test_prompts_are_repeatable_and_what_is_held_out_stays_out(folder):
    documents = read_documents([folder / "texts"])
    tokenizer = load_tokenizer(folder)
    make = PromptMaker(documents, tokenizer, 5)
    prompts = [make(n) for n in range(400)]
    assert prompts == [PromptMaker(documents, tokenizer, 5)(n) for n in range(400)]
    assert prompts[:20] != [PromptMaker(documents, tokenizer, 6)(n) for n in range(20)]
    assert [p.number for p in prompts if p.held] == list(range(HELD_EVERY - 1, 400, HELD_EVERY))
    assert all(p.temperature == 0 for p in prompts if p.held)
    assert {p.kind for p in prompts} == {"topic", "text", "raw"}
    (held,) = make._texts[1]
    assert held not in make._texts[0] and len(make._texts[0]) == 3
    held_topics = {d.text for d in make._topics[1]}
    assert held_topics and len(held_topics) + len(make._topics[0]) == len(topics())
    for p in prompts:
        if not p.held and p.kind == "topic":
            text = tokenizer.decode(p.ids, skip_special_tokens=False)
            assert not any(f"user\n{topic}<" in text for topic in held_topics)


def test_recorded_states_are_those_of_the_model_alone(folder):
    """Each text, written among others, equals its dense recomputation: tokens and states, in place."""
    model, tokenizer = model_of(folder), load_tokenizer(folder)
    make = PromptMaker(read_documents([folder / "texts"]), tokenizer, 0)
    prompts = [make(n) for n in range(24)]
    recordings = Recorder(model, 640, frozenset(tokenizer.eos_ids), 10, seed=0).run(prompts)
    assert [r.number for r in recordings] == list(range(24))
    kv: DenseKV = dense_engine(model).runner.kv
    checked = 0
    for prompt, r in zip(prompts, recordings, strict=True):
        assert r.tokens[: r.prompt].tolist() == list(prompt.ids) and r.held == prompt.held
        assert len(r.tokens) - r.prompt == 10 or int(r.tokens[-1]) in tokenizer.eos_ids
        ids = r.tokens[:-1].long()
        request = Request(ids.tolist(), SamplingParams(), 256, 0, block_table=list(range(40)))
        alone = model.forward(
            ids, torch.arange(len(ids)), kv.begin([ScheduledRow(request, 0, len(ids), True)])
        )
        torch.testing.assert_close(r.hidden.float(), alone, rtol=2e-2, atol=2e-2)
        if prompt.temperature == 0:
            checked += 1
            best = model.logits(alone)[r.prompt - 1 :].argmax(1)
            assert best.tolist() == r.tokens[r.prompt :].tolist()
    assert checked > 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f, d: ["--data", str(d / "nowhere")], "no such file"),
        (lambda f, d: ["--data", str(d)], "holds no text"),
        (lambda f, d: ["--data", str(f / "model.safetensors")], "not UTF-8"),
        (lambda f, d: ["--steps", "0"], "steps: must be between 1"),
        (lambda f, d: ["--inner", "33"], "multiple of 16"),
        (lambda f, d: ["--lr", "0"], "lr: must be above 0"),
        (lambda f, d: ["--output", str(d / "head.pt")], "must end in .safetensors"),
    ],
)
def test_bad_input_is_refused(folder, tmp_path, capsys, change, match):
    assert train.main(command(folder, tmp_path / "h.safetensors", *change(folder, tmp_path))) == 1
    assert match in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_short_text_is_refused_and_a_long_one_is_cut(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("short")
    with pytest.raises(ConfigError, match="another is needed"):
        read_documents([path])
    path.write_text("many words " * 2000)
    assert len(read_documents([path])) == 4


# --- training ------------------------------------------------------------------------------------------


def trainer_of(folder, output, steps):
    model = model_of(folder)
    texts = [t for f in sorted(work_of(output).glob("shard*")) for t in load_recordings(f) if not t.held]
    config, _ = read_config(output)
    ids = fit.draft_vocabulary(texts, 640, config.vocab)
    return fit.Trainer(
        config, fit.Texts.of(texts), model.embed, model.lm_head, ids, steps=steps, batch=8, lr=1e-2, seed=0,
        half=False,
    )  # fmt: skip


def test_the_loss_falls(folder, trained):
    trainer = trainer_of(folder, trained, 40)
    batch = trainer.texts.batch(0, 32, 0)
    before = [trainer.loss(batch, unroll).item() for unroll in (1, 4)]
    trainer.run(40, lambda step, loss: None)
    after = [trainer.loss(batch, unroll).item() for unroll in (1, 4)]
    assert after[0] < before[0] - 0.5 and after[1] < before[1] - 0.5


def test_every_state_is_seen_once_per_epoch(folder, trained):
    texts = trainer_of(folder, trained, 1).texts
    size, few = 10, round(10 * fit.PROMPT_SHARE)
    steps = len(texts.written) // (size - few)
    begins = [texts.batch(s, size, 0).view(size, -1)[:, 0] for s in range(steps)]
    seen = torch.cat([b[: size - few] for b in begins]).tolist()
    assert len(set(seen)) == len(seen) == (size - few) * steps and set(seen) <= set(texts.written.tolist())
    assert set(torch.cat([b[size - few :] for b in begins]).tolist()) <= set(texts.prompts.tolist())


def test_cross_entropy_and_its_gradient_equal_torch():
    logits = torch.randn(6, 50, requires_grad=True)
    truth = torch.randn(6, 50).softmax(1)
    plain = F.cross_entropy(logits, truth)
    own = fit._CrossEntropy.apply(logits, truth)
    torch.testing.assert_close(own, plain)
    expected = torch.autograd.grad(3 * plain, logits)
    torch.testing.assert_close(torch.autograd.grad(3 * own, logits), expected)


def test_a_killed_run_continues_and_ends_the_same(folder, trained, tmp_path, monkeypatch):
    output = tmp_path / "h.safetensors"
    monkeypatch.setattr(train, "SHARD", train.FEWEST)
    monkeypatch.setattr(train, "SAVE_EVERY", 4)
    run, record = fit.Trainer.run, Recorder.run

    def killed(self, *args):
        raise KeyboardInterrupt

    def killed_after_a_shard(self, prompts, progress):
        return killed(self) if prompts[0].number else record(self, prompts, progress)

    monkeypatch.setattr(Recorder, "run", killed_after_a_shard)
    assert train.main(command(folder, output)) == 130
    assert len(list(work_of(output).glob("shard*"))) == 1
    monkeypatch.setattr(Recorder, "run", record)
    monkeypatch.setattr(fit.Trainer, "run", lambda self, *a: killed(self) if self.step else run(self, *a))
    assert train.main(command(folder, output)) == 130
    assert (work_of(output) / "checkpoint.safetensors").exists() and not output.exists()
    monkeypatch.setattr(fit.Trainer, "run", run)
    monkeypatch.setattr(Recorder, "run", killed)  # nothing is recorded again
    assert train.main(command(folder, output)) == 0
    expected, got = load_file(trained), load_file(output)
    assert expected.keys() == got.keys() and all(torch.equal(expected[n], got[n]) for n in got)
    assert read_config(output) == read_config(trained)


def test_a_work_folder_of_another_run_is_refused(folder, trained, tmp_path, capsys):
    output = tmp_path / "h.safetensors"
    shutil.copytree(work_of(trained), work_of(output))
    assert train.main(command(folder, output, "--seed", "1")) == 1
    assert "holds another run: its seed is 0, this one's is 1" in capsys.readouterr().err
    assert train.main(command(folder, output, "--lr", "0.5")) == 1
    assert "cannot be resumed from" in capsys.readouterr().err
    (work_of(output) / "shard-0000.safetensors").write_bytes(b"nothing")
    assert train.main(command(folder, output)) == 1
    assert "shard-0000.safetensors: is damaged" in capsys.readouterr().err
    (work_of(output) / "recipe.json").write_text("[1]")
    assert train.main(command(folder, output)) == 1
    assert "recipe.json is damaged" in capsys.readouterr().err


def test_places_that_cannot_be_written_are_refused_first(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.Run, "load", lambda self, dtype: pytest.fail("the model was loaded"))
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "file").touch()
    for output, words in (
        (tmp_path / "dir.safetensors", "output: "), (tmp_path / "file" / "h.safetensors", "output: "),
    ):  # fmt: skip
        assert train.main(command(folder, output)) == 1
        assert f"error: {words}" in capsys.readouterr().err
    assert train.main(command(folder, tmp_path / "h.safetensors", "--work", str(tmp_path / "file"))) == 1
    assert "error: work: " in capsys.readouterr().err
