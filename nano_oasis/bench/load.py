"""A load on an OpenAI-compatible server: prompts, arrivals, streamed answers with the time of every chunk.

Owns: these. Must not know: which server it is, what is computed from the times, tables.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_TEXT = """anchor basket candle desert ember forest garden harbor island jacket kettle ladder meadow needle
orchard pepper quarry ribbon saddle timber urchin valley walnut yellow zephyr almond bridge copper dragon
engine feather glacier hammer iron jungle lantern marble nickel oyster pillow rocket silver tunnel velvet
window winter cotton pencil planet"""
_WORDS = _TEXT.split()


class LoadError(ValueError):
    """The server cannot be used as asked, in words."""


@dataclass
class Sent:
    """One request's life, in seconds of time.perf_counter(). chunks: when each piece of text came."""

    began: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.began

    @property
    def tpot(self) -> float:
        """Time per output token after the first; NaN for one token."""
        steps = self.output_tokens - 1
        return (self.chunks[-1] - self.chunks[0]) / steps if steps > 0 else math.nan

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: between chunks, which may hold several tokens."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True)
class Target:
    """Where to send what. url: of the endpoint; extra: more fields of every request body."""

    url: str
    model: str
    chat: bool
    key: str = ""
    ignore_eos: bool = True
    timeout: float = 3600.0
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        asked |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return asked | self.extra


def random_prompts(count: int, words: int, shared: int, spread: float, seed: int) -> list[str]:
    """Prompts of words that begin alike for `shared` words. spread: lengths vary by that share, evenly.

    A word is about one token. Where nothing is shared the first words differ, so no prefix is."""
    draw = random.Random(seed)
    beginning = [draw.choice(_WORDS) for _ in range(shared)]
    prompts = []
    for i in range(count):
        length = max(1, round(words * draw.uniform(1 - spread, 1 + spread)))
        own = [str(seed * count + i), *(draw.choice(_WORDS) for _ in range(length - 1))]
        prompts.append(" ".join(beginning + own))
    return prompts


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds between requests: gamma-distributed around 1 / rate; burstiness 1 is a Poisson process,
    below it requests come in bursts."""
    draw = random.Random(seed)
    while True:
        yield 0.0 if math.isinf(rate) else draw.gammavariate(burstiness, 1 / (rate * burstiness))


async def send_all(
    target: Target, prompts: Sequence[str], max_tokens: int, *, rate: float = math.inf,
    burstiness: float = 1.0, at_once: int | None = None, seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Sent]:  # fmt: skip
    """Send every prompt at its time, at most `at_once` at a time; results in the order of the prompts.

    A request that fails is a result with an error; the others go on."""
    room = asyncio.Semaphore(at_once or len(prompts) or 1)
    gaps, done = arrivals(rate, burstiness, seed), 0

    async def one(session: aiohttp.ClientSession, prompt: str) -> Sent:
        nonlocal done
        async with room:
            sent = await send(session, target, prompt, max_tokens)
        done += 1
        progress(done)
        return sent

    timeout = aiohttp.ClientTimeout(total=target.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        tasks = []
        due = time.perf_counter()
        for i, prompt in enumerate(prompts):
            if i:
                due += next(
                    gaps
                )  # from when it was due, not from when it was sent: a late one delays no other
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(session, prompt)))
        return list(await asyncio.gather(*tasks))


async def send(session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int) -> Sent:
    """One streamed request."""
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    sent = Sent(time.perf_counter())
    try:
        body = target.body(prompt, max_tokens)
        async with session.post(target.url, json=body, headers=headers) as response:
            if response.status != 200:
                sent.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return sent
            async for line in response.content:
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    _take(sent, json.loads(data))
    except (TimeoutError, aiohttp.ClientError, ValueError, OSError) as error:
        sent.error = f"{type(error).__name__}: {error}"
        return sent
    sent.ended = time.perf_counter()
    if not sent.chunks:
        sent.error = "the answer has no text"
    elif not sent.output_tokens:
        sent.output_tokens = len(sent.chunks)  # a server that does not report usage
    return sent


def _take(sent: Sent, event: dict[str, Any]) -> None:
    if event.get("error"):
        raise ValueError(f"the server ended the stream: {event['error']}")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if piece:
            sent.chunks.append(time.perf_counter())
            sent.text += piece
    usage = event.get("usage") or {}
    sent.prompt_tokens = usage.get("prompt_tokens", sent.prompt_tokens)
    sent.output_tokens = usage.get("completion_tokens", sent.output_tokens)


async def first_model(base_url: str, key: str = "") -> str:
    """The first id of GET /v1/models. Raises LoadError when the server is not there or has none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(url, headers=headers) as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise LoadError(f"--base-url: {url}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LoadError(f"--base-url: {url} lists no model; name one with --model") from error
