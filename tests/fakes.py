"""A fake model and tokenizer, so that scheduling, memory and the step loop are tested without weights.

The fake model keeps each token's id in the paged KV cache and derives its logits from what it reads
back through the block table. A wrong block, a stale slot or a missed write therefore changes the
output, and an unwritten slot (NaN) raises.
"""

from __future__ import annotations

import torch

from nano_oasis.config import EngineInfo, ModelConfig, RopeConfig
from nano_oasis.engine import Engine, call_sinks
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.metrics import Metrics
from nano_oasis.outputs import GenerationError, OutputBuilder
from nano_oasis.request import SamplingParams, TokenEvent
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.scheduler import Scheduler

VOCAB = 64
EOS = 63
MODEL = ModelConfig("llama", VOCAB, 1, 1, 1, 1, 1, 1, 4096, 1e-5, RopeConfig(), eos_token_ids=(EOS,))


class FakeTokenizer:
    """Id i is one character; 60 and 61 are the two halves of an e with acute; 63 is special."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = frozenset({EOS})
    special_ids = frozenset({EOS})
    chat_template = None
    strips_first_space = False

    def token_bytes(self, i: int) -> bytes:
        if i >= VOCAB:
            return b""
        return {60: b"\xc3", 61: b"\xa9", EOS: b"<e>"}.get(i, bytes([48 + i]))

    def token_text(self, i: int) -> str:
        return self.token_bytes(i).decode("utf-8", "replace")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [b - 48 for b in text.encode()]

    def decode(self, ids, *, skip_special_tokens: bool = True) -> str:
        keep = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in keep).decode("utf-8", "replace")


class FakeModel:
    """hidden [T, 1] is a hash of the tokens at positions 0..p as the cache holds them."""

    def __init__(self) -> None:
        self.fail_on: int | None = None  # a token id whose presence makes the forward pass raise
        self.steps: list[int] = []  # tokens of each step

    def forward(self, token_ids, positions, kv):
        cache, batch = kv.cache, kv.batch
        if self.fail_on is not None and self.fail_on in token_ids.tolist():
            raise RuntimeError("injected step failure")
        self.steps.append(len(token_ids))
        keys = cache.keys[0].view(-1)
        keys[batch.slots] = token_ids.to(keys.dtype)
        hidden = []
        for r, end in enumerate(batch.context_list):
            table = batch.block_table[r].long()
            at = torch.arange(end)
            seen = keys[table[at // cache.block_size] * cache.block_size + at % cache.block_size]
            assert not seen.isnan().any(), "a slot was read before it was written"
            count = batch.query_list[r + 1] - batch.query_list[r]
            h, states = 7, []
            for token in seen.tolist():
                h = (h * 31 + int(token) + 11) % 1_000_003
                states.append(h)
            hidden += states[end - count :]
        return torch.tensor(hidden, dtype=torch.float64)[:, None]

    def logits(self, hidden):
        return (torch.sin(hidden * torch.arange(1, VOCAB + 1)) * 4).float()


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int | None = None,
    prefix: bool = True,
    model: FakeModel | None = None,
    seed: int | None = None,
    deliver=call_sinks,
    stall_timeout: float = 60.0,
    draft=None,
    policy=None,
) -> Engine:
    """An engine whose loop is not started: tests call turn() themselves, or start() it."""
    cache = KVCache.allocate(MODEL, num_blocks, block_size, torch.float64, "cpu")
    cache.keys.fill_(torch.nan)
    blocks = BlockManager(num_blocks, block_size, prefix)
    limit = max_model_len or num_blocks * block_size
    info = EngineInfo("fake", "float64", "cpu", block_size, num_blocks, num_blocks * block_size, 0, limit)
    return Engine(
        Runner(model or FakeModel(), DenseKV(cache, select_kernels("cpu")), Sampler(VOCAB), draft=draft),
        Scheduler(blocks, max_num_seqs, max_num_batched_tokens, drafts=policy),
        FakeTokenizer(),
        MODEL,
        info,
        Metrics("fake"),
        seed=seed,
        stall_timeout=stall_timeout,
        deliver=deliver,
    )


class Caller:
    """Collects one submission's events, and checks that an index is silent once finished."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.engine = engine
        self.events: list[TokenEvent] = []
        self.error: str | None = None
        self.builder = OutputBuilder("r", None, prompt, params.n, engine.tokenizer)
        self.submission = engine.submit(prompt, params, self._take)

    def _take(self, event: TokenEvent) -> None:
        ended = [e.index for e in self.events if e.finish_reason]
        assert event.index not in ended, "an event after the last one"
        self.events.append(event)
        try:
            self.builder.add(event)
        except GenerationError as error:
            self.error = str(error)

    @property
    def done(self) -> bool:
        return self.error is not None or self.builder.result.finished

    @property
    def outputs(self):
        return self.builder.result.outputs


def turn(engine: Engine) -> None:
    """What the step thread does once, on this thread."""
    if engine._inbox or engine.scheduler.has_work:
        engine._take_inbox()
    if engine.scheduler.has_work:
        engine.step()
    engine.scheduler.check()


def run(engine: Engine, *callers: Caller, limit: int = 2000) -> None:
    """Turn until everyone is done; a hang is a failure, not a wait."""
    for _ in range(limit):
        if all(c.done for c in callers):
            return
        turn(engine)
    raise AssertionError(f"no end after {limit} turns")


def solo(prompt: list[int], params: SamplingParams, **options):
    """The same request on a fresh engine that runs only it, with every feature off."""
    options = {"num_blocks": 256, "max_num_batched_tokens": 4096, "prefix": False, **options}
    engine = make_engine(**options)
    caller = Caller(engine, prompt, params)
    run(engine, caller)
    return caller.outputs


def same(got, expected) -> None:
    """Asserts that two lists of CompletionOutput say the same, but for rounding in logprobs."""
    for a, b in zip(got, expected, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs:
            assert [list(x) for x in a.logprobs] == [list(x) for x in b.logprobs]
