"""A real AsyncEngine over a fake model and a byte tokenizer: for tests of the API, the server and chat.

The model is a running hash kept in the KV cache, so it is fast, deterministic, and different for every
prefix; `force` dictates what it says after a given prompt. Hooks make it slow, stall, fail or die.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from nano_oasis.async_engine import AsyncEngine
from nano_oasis.config import EngineConfig, EngineInfo, ModelConfig, RopeConfig
from nano_oasis.engine import Engine
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.metrics import Metrics
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.scheduler import Scheduler
from nano_oasis.tokenizer import TemplateError
from nano_oasis.tokenizer.messages import normalise_messages

WORDS = ("hello", " world", " the", " quick", " brown", " fox", "ing", " and", "The", " of")
EOS, USER, ASSISTANT, SYSTEM = 300, 301, 302, 303
SPECIAL = {EOS: "<|end|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", SYSTEM: "<|system|>"}
VOCAB = 310  # ids 304 to 309 are padding
MODEL = ModelConfig("llama", VOCAB, 1, 1, 1, 1, 1, 1, 4096, 1e-5, RopeConfig(), eos_token_ids=(EOS,))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 on are WORDS, then the special tokens."""

    vocab_size = 304
    bos_id = None
    eos_ids = frozenset({EOS})
    special_ids = frozenset(SPECIAL)
    chat_template = "fake"
    strips_first_space = False

    def token_bytes(self, i: int) -> bytes:
        if i < 256:
            return bytes([i])
        if i < 256 + len(WORDS):
            return WORDS[i - 256].encode()
        return SPECIAL.get(i, "").encode()

    def token_text(self, i: int) -> str:
        return self.token_bytes(i).decode("utf-8", "replace")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        pieces = [(w, 256 + i) for i, w in enumerate(WORDS)] + [(s, i) for i, s in SPECIAL.items()]
        ids, at = [], 0
        while at < len(text):
            for piece, i in pieces:
                if text.startswith(piece, at):
                    ids.append(i)
                    at += len(piece)
                    break
            else:
                ids += text[at].encode()
                at += 1
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        keep = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in keep).decode("utf-8", "replace")

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        names = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
        ids = []
        messages = normalise_messages(messages)
        for previous, message in zip([None, *messages], messages, strict=False):
            if message["role"] not in names or (previous and previous["role"] == message["role"]):
                raise TemplateError("Conversation roles must alternate user/assistant")
            ids += [names[message["role"]], *self.encode(message["content"]), EOS]
        return [*ids, ASSISTANT]


class ByteModel:
    """hidden [T, 1] is a hash of all tokens so far; printable ASCII and words are likely, EOS never."""

    def __init__(self) -> None:
        self.delay = 0.0  # seconds per step
        self.stalled = threading.Event()  # set: the step does not return
        self.fail_on: int | None = None  # a token id whose presence makes a step raise
        self.die = False  # the step thread ends
        self._forced: dict[int, int] = {}
        ids = torch.arange(VOCAB)
        likely = ((ids >= 32) & (ids < 127)) | ((ids >= 256) & (ids < 256 + len(WORDS)))
        self.bias = torch.where(likely, 0.0, -30.0)

    def force(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """After exactly this prompt, whatever the sampling parameters, say this."""
        state = 7
        for token in prompt:
            state = _next_state(state, token)
        for token in output:
            self._forced[state] = token
            state = _next_state(state, token)

    def forward(self, token_ids: Any, positions: Any, kv: Any) -> torch.Tensor:
        cache, batch = kv.cache, kv.batch
        if self.delay:
            time.sleep(self.delay)
        while self.stalled.is_set():
            time.sleep(0.005)
        if self.die:
            raise SystemExit("the step loop is killed")
        tokens = token_ids.tolist()
        if self.fail_on in tokens:
            raise RuntimeError("injected step failure")
        states, slots = cache.keys[0].view(-1), batch.slots.tolist()
        hidden = []
        for r, end in enumerate(batch.context_list):
            rows = range(batch.query_list[r], batch.query_list[r + 1])
            before = end - len(rows) - 1
            state = 7
            if before >= 0:
                block = int(batch.block_table[r, before // cache.block_size])
                state = int(states[block * cache.block_size + before % cache.block_size])
            for t in rows:
                state = _next_state(state, tokens[t])
                states[slots[t]] = state
                hidden.append(state)
        return torch.tensor(hidden, dtype=torch.float64)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = (hidden * (torch.arange(VOCAB) * 7919 + 1) % 999_983 / 999_983 * 8).float() + self.bias
        for row, state in enumerate(hidden[:, 0].tolist()):
            if int(state) in self._forced:
                out[row, self._forced[int(state)]] = 1000.0
        return out


def _next_state(state: int, token: int) -> int:
    return (state * 31 + token + 11) % 1_000_003


class FakeEngine(AsyncEngine):
    """AsyncEngine whose start() builds the fake model. The class attributes are settings for tests."""

    load_s = 0.0
    load_error: Exception | None = None

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        options = {"max_model_len": 256, "num_device_blocks": 512, **options} if config is None else {}
        super().__init__(config, **options)
        self.model = ByteModel()

    async def start(self, progress: Any = None) -> None:
        with mock.patch("nano_oasis.async_engine.build_engine", self._build):
            await super().start(progress)

    def _build(self, c: EngineConfig, progress: Any, deliver: Any) -> Engine:
        """What build_engine does, on the loading thread."""
        report = progress or (lambda what, done, total: None)
        report("weights", 0, 10)
        time.sleep(self.load_s)
        if self.load_error is not None:
            raise self.load_error
        report("weights", 10, 10)
        blocks, limit = c.num_device_blocks or 512, c.max_model_len or 256
        cache = KVCache.allocate(MODEL, blocks, c.block_size, torch.float64, "cpu")
        name = c.served_model_name or "fake"
        manager = BlockManager(blocks, c.block_size, c.enable_prefix_caching)
        return Engine(
            Runner(self.model, DenseKV(cache, select_kernels("cpu")), Sampler(ByteTokenizer.vocab_size)),
            Scheduler(manager, c.max_num_seqs, c.max_num_batched_tokens),
            ByteTokenizer(),  # type: ignore[arg-type]
            MODEL,
            EngineInfo(name, "float64", "cpu", c.block_size, blocks, blocks * c.block_size, 1024, limit),
            Metrics(name),
            seed=c.seed,
            stall_timeout=c.stall_timeout,
            deliver=deliver,
        )

    @property
    def idle(self) -> bool:
        """No live request, and no block in use."""
        return not self.engine.num_live and self.engine.scheduler.blocks.num_used == 0


if __name__ == "__main__":  # `python fake_engine.py --port 0 ...`: the serve command on the fake engine
    import os
    import sys

    from nano_oasis import serve

    FakeEngine.load_s = float(os.environ.get("FAKE_LOAD_S", "0"))
    if "FAKE_LOAD_ERROR" in os.environ:
        FakeEngine.load_error = ValueError(os.environ["FAKE_LOAD_ERROR"])

    def make(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.model.delay = float(os.environ.get("FAKE_STEP_S", "0"))
        return engine

    serve.leave(serve.main(sys.argv[1:], make))
