"""How drafts of a head are counted, and the head in the package."""

import torch

from nano_oasis.model import Model
from nano_oasis.spec import measure
from nano_oasis.spec.head import DraftHead, head_path
from nano_oasis.spec.prompts import Prompt, topics
from nano_oasis.spec.recording import Recorder, Recording
from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.weights import load_checkpoint, resolve_model


class Reciter:
    """A head that knows the text: its state is the place, and it errs at some places."""

    def __init__(self, tokens, wrong=()):
        self.tokens, self.wrong = tokens, wrong
        self.draft_ids = torch.tensor(tokens[:5])

    def step(self, state, tokens):
        known = [*self.tokens, *[0] * 9]
        places = [int(s) + 1 for s in state[:, 0]]
        assert all(t == known[p] or p in self.wrong for t, p in zip(tokens.tolist(), places, strict=True))
        drafts = [-1 if p + 1 in self.wrong else known[p + 1] for p in places]
        return state + 1, torch.tensor(drafts), torch.ones(len(places))


def test_acceptance_counts_the_steps_of_a_drafting_engine():
    tokens = list(range(100, 120))
    text = Recording(0, torch.tensor(tokens), torch.arange(19.0)[:, None].half(), prompt=4, held=True)
    # 16 tokens: the first is the prefill's, 15 follow; with 4 right drafts a step gives 5 of them.
    figures = measure.acceptance(Reciter(tokens), [text])
    assert (figures["steps"], figures["per_step"], figures["given"]) == (3, 5.0, [1.0] * 4)
    assert figures["in_vocab"] == round(1 / 16, 4)
    # Wrong about place 7: the first step keeps places 5, 6 and the target's 7, then 8-12, 13-17, 18-19.
    figures = measure.acceptance(Reciter(tokens, wrong={7}), [text])
    assert figures["steps"] == 4 and figures["accepted"] == [1.0, 1.0, 0.5, 0.5]
    assert figures["given"] == [1.0, 1.0, 0.6667, 1.0] and figures["per_step"] == 3.75
    assert measure.acceptance(Reciter(tokens), [])["per_step"] == 0


# --- the head in the package ---------------------------------------------------------------------------


def test_the_default_model_has_a_head_that_drafts():
    """On questions that are not in topics.txt, written by the target here."""
    path = resolve_model("smollm2")
    checkpoint = load_checkpoint(path, torch.float32)
    model, tokenizer = Model(checkpoint.config, checkpoint.tensors, 256), load_tokenizer(path)
    shipped = head_path(model)
    assert shipped is not None and shipped.stat().st_size <= 10_000_000
    asked = ["How do I plan a garden for a small yard?", "Describe what a teacher does all day."]
    ids = [tuple(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in asked]
    assert not set(asked) & {topic.text for topic in topics()}
    prompts = [Prompt(i, some, 0.0, True, "topic") for i, some in enumerate(ids)]
    texts = Recorder(model, tokenizer.vocab_size, frozenset(tokenizer.eos_ids), 40, seed=0).run(prompts)
    figures = measure.acceptance(DraftHead.load(shipped, model), texts)
    assert figures["per_step"] > 1.3
