"""The bench command: its arithmetic, the load generator against servers that misbehave, each command once.

Owns: these checks; none of them is about how fast anything is. Must not know: kernels, the engine's insides.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_oasis.bench import idle, serve
from nano_oasis.bench.__main__ import main
from nano_oasis.bench.load import Sent, arrivals, random_prompts
from nano_oasis.bench.offline import Step
from nano_oasis.bench.report import Spread, percentile
from nano_oasis.bench.roofline import Ceilings
from nano_oasis.bench.step import Parts
from nano_oasis.bench.throughput import figures


# --- arithmetic ---------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, share), abs=1e-6)


def test_a_spread_shows_its_median_and_half_its_range() -> None:
    assert str(Spread((10.0, 30.0, 20.0))) == "20.0 ±50%" and str(Spread((1234.5,))) == "1,234"


def test_the_floor_is_the_larger_of_bytes_and_products() -> None:
    c = Ceilings(bandwidth=100.0, products=10.0, threads=1)
    assert c.floor(200.0, 5.0) == 2.0 and c.floor(50.0, 30.0) == 3.0


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.array([g for g, _ in zip(arrivals(5.0, burstiness, 1), range(20_000), strict=False)])
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.var() == pytest.approx(0.04 / burstiness, rel=0.1)
    assert [g for g, _ in zip(arrivals(math.inf, 1.0, 1), range(3), strict=False)] == [0.0] * 3


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    prompts = [p.split() for p in random_prompts(20, words=30, shared=7, spread=0.5, seed=3)]
    assert len({tuple(p[:7]) for p in prompts}) == 1 and len({p[7] for p in prompts}) == 20
    assert {15 <= len(p) - 7 <= 45 for p in prompts} == {True} and len({len(p) for p in prompts}) > 5
    assert random_prompts(3, 9, 0, 0.0, 1) == random_prompts(3, 9, 0, 0.0, 1)
    assert set(random_prompts(3, 9, 0, 0.0, 1)).isdisjoint(random_prompts(3, 9, 0, 0.0, 2))


def test_figures_of_a_pass() -> None:
    a = Sent(0.0, [1.0, 2.0, 3.0], 3.5, prompt_tokens=10, output_tokens=6)  # two tokens a chunk
    b = Sent(0.5, [1.5, 2.5], 4.0, prompt_tokens=4, output_tokens=2)
    c = Sent(0.5, error="HTTP 500")
    f = serve.summarise([a, b, c], [50])
    assert (f["requests"], f["failed"], f["errors"]) == (3, 1, ["HTTP 500"])
    assert f["output_tokens_per_s"] == 8 / 4 and f["total_tokens_per_s"] == 22 / 4
    assert f["ttft"]["p50"] == 1000 and f["e2el"]["mean"] == 3500 and f["itl"]["p50"] == 1000
    assert f["tpot"]["p50"] == pytest.approx(1000 * (2 / 5 + 1.0) / 2)
    # Both decode from 1.5 to 2.5: one chunk of a's, of two tokens, and one of b's.
    assert f["decode_tokens_per_s"] == pytest.approx(3.0)
    assert serve.together([a, Sent(0.0, [9.0, 10.0], 10.0, output_tokens=2)]) is None
    assert serve.summarise([c], [50]) == {"requests": 1, "failed": 1, "errors": ["HTTP 500"]}


def test_a_step_with_a_chunk_is_prefill() -> None:
    steps = [Step(2.0, 90, 3, (90, 5, 6), 0), Step(0.5, 0, 4, (91, 6), 0), Step(0.25, 0, 2, (92, 7), 0)]
    f = figures(steps, 4.0, 9)
    assert f["decode_tokens_per_s"] == 6 / 0.75 and f["prefill_tokens_per_s"] == 45
    assert f["output_tokens_per_s"] == 9 / 4 and f["decode_ms"] == 375


def test_parts_add_up_and_inner_time_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 7.0, 10.0])  # outer in, a in, a out, a in, a out, outer out
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    parts = Parts()
    inner = parts.timed(lambda: None, "inner")
    parts.timed(lambda: (inner(), inner()), "outer")()
    assert parts.seconds == {"inner": 5.0, "outer": 5.0} and parts.calls == 3


def test_others_are_those_outside_our_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    me, busy = idle.os.getpid(), iter([100.0, 107.0])
    tables = iter([
        {me: (1, 10.0), 7: (me, 1.0), 8: (1, 50.0), 9: (8, 1.0)},
        {me: (1, 11.0), 7: (me, 2.0), 8: (1, 51.0), 9: (8, 2.0)},
    ])  # fmt: skip
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(idle, "_busy", lambda: next(busy))
    monkeypatch.setattr(idle, "_processes", lambda: next(tables))
    monkeypatch.setattr(idle.time, "perf_counter", lambda: next(clock))
    assert idle.Others(server=8).cores() == (7.0 - 4.0) / 2.0


# --- the load generator -------------------------------------------------------------------------------
class Misbehaving:
    """Answers with three chunks of two tokens, or as the prompt's last word asks."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.now = self.most = 0
        self.port = 0
        self._loop, self._up = asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._up.wait(20)

    def _run(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)

        async def start() -> None:
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            self._up.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._answer(request, body)
        finally:
            self.now -= 1

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        how = body.get("how", "well")
        if how == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=400)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for piece in ("a", "b", "c"):
            await asyncio.sleep(0.005)
            choice = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
            if how == "silent":
                choice = {"text": ""}
            await stream.write(b": ping\n\ndata: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if how == "break":
                request.transport.close()
                return stream
            if how == "fail":
                await stream.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        if how != "uncounted":
            usage = {"prompt_tokens": 9, "completion_tokens": 6}
            await stream.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    yield Misbehaving()


def load(server: Misbehaving, tmp_path, *options: str) -> tuple[int, dict]:
    file = tmp_path / "out.json"
    code = main(["serve", "--base-url", server.url, "--num-prompts", "6", "--random-input-len", "5",
                 "--output", str(file), *options])  # fmt: skip
    return code, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_counts_tokens_and_limits_concurrency(server: Misbehaving, backend: str, tmp_path) -> None:
    code, saved = load(server, tmp_path, "--max-concurrency", "2", "--passes", "2", "--num-warmups", "0",
                       "--backend", backend)  # fmt: skip
    assert code == 0 and server.most == 2 and saved["options"]["model"] == "fake"
    for figures_of_pass in saved["results"]:
        assert (figures_of_pass["prompt_tokens"], figures_of_pass["output_tokens"]) == (54, 36)
    first, again = server.bodies[:6], server.bodies[6:]
    text = "prompt" if backend == "openai" else "messages"
    assert sorted(str(b[text]) for b in first) == sorted(str(b[text]) for b in again)
    assert len({str(b[text]) for b in first}) == 6
    assert all(b["ignore_eos"] and b["stream"] and b["max_tokens"] == 128 for b in server.bodies)


@pytest.mark.parametrize(
    ("how", "says"),
    [("refuse", "HTTP 400"), ("break", "Payload"), ("fail", "out of memory"), ("silent", "no text")],
)
def test_a_failed_request_is_reported_and_costs_only_itself(
    server: Misbehaving, how: str, says: str, tmp_path
) -> None:
    extra = json.dumps({"how": how})
    code, saved = load(server, tmp_path, "--num-warmups", "0", "--extra-body", extra)
    assert code == 1 and saved["results"][0]["failed"] == 6 and says in saved["results"][0]["errors"][0]
    code, _ = load(server, tmp_path, "--extra-body", extra)  # the warm-up ends it, with the reason
    assert code == 1


def test_a_server_without_usage_is_counted_by_chunks(server: Misbehaving, tmp_path) -> None:
    code, saved = load(server, tmp_path, "--extra-body", '{"how": "uncounted"}', "--respect-eos")
    assert code == 0 and saved["results"][0]["output_tokens"] == 18
    assert not any("ignore_eos" in b for b in server.bodies)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts: at least 1"),
        (["--request-rate", "0"], "--request-rate: above 0"),
        (["--request-rate", "nan"], "--request-rate: above 0"),
        (["--random-range-ratio", "2"], "--random-range-ratio: 0 to 1"),
        (["--metric-percentiles", "50,fast"], "--metric-percentiles"),
        (["--extra-body", "[1]"], "--extra-body: expected a JSON object"),
        (["--base-url", "localhost:1"], "--base-url: begins with http"),
        (["--base-url", "http://127.0.0.1:9"], "--base-url: http://127.0.0.1:9/v1/models"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(options: list[str], says: str, capsys) -> None:
    assert main(["serve", *options]) == 1
    assert says in capsys.readouterr().err


# --- the other commands -------------------------------------------------------------------------------
ENGINE = ["--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"]


@pytest.mark.parametrize("mode", ["dense", "oasis"])
def test_throughput_and_step_run_on_a_model(folder, mode: str, tmp_path, capsys) -> None:
    engine = ["--model", str(folder), "--kv-mode", mode, *ENGINE]
    file = tmp_path / "t.json"
    code = main(["throughput", *engine, "--num-prompts", "3", "--input-len", "40", "--output-len", "6",
                 "--repeats", "2", "--output", str(file)])  # fmt: skip
    passes = json.loads(file.read_text())["results"]["passes"]
    assert code == 0 and [p["prefill_tokens"] for p in passes] == [120.0, 120.0]
    assert all(p["decode_tokens_per_s"] > 0 and p["decode_floor_ms"] > 0 for p in passes)
    code = main(
        ["step", *engine, "--streams", "2", "--input-len", "30", "--steps", "5", "--output", str(file)]
    )
    result = json.loads(file.read_text())["results"]
    # Steps of this model are so short that one stream may be a few ahead of the other.
    assert code == 0 and 0 < result["steps"] <= 5
    assert sum(result["ms"].values()) == pytest.approx(result["step_ms"], rel=0.2)
    assert {"layers without attention", "logits", "attention", "sampler", "scheduler"} <= set(result["ms"])
    assert "of the step" in capsys.readouterr().out


def test_same_prompts_are_found_in_the_prefix_cache(folder, tmp_path) -> None:
    file = tmp_path / "t.json"
    main(["throughput", "--model", str(folder), *ENGINE, "--num-prompts", "2", "--input-len", "50",
          "--output-len", "3", "--repeats", "2", "--same-prompts", "--output", str(file)])  # fmt: skip
    first, again = json.loads(file.read_text())["results"]["passes"]
    assert first["prefill_tokens"] == 100 and again["prefill_tokens"] < 10


def test_kernels_run_and_say_their_floor(tmp_path) -> None:
    file = tmp_path / "k.json"
    code = main(
        ["kernels", "--only", "linear 64", "--hidden", "64,32", "--repeats", "2", "--output", str(file)]
    )
    cases = json.loads(file.read_text())["results"]["cases"]
    assert code == 0 and len(cases) == 5
    assert [c["flops"] for c in cases] == [2.0 * n * 64 * 64 for n in (1, 4, 8, 16, 64)]
    assert all(c["bytes"] == 4 * 64 * 64 and len(c["seconds"]["values"]) == 2 for c in cases)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["kernels", "--only", "no such case"], "--only"),
        (["kernels", "--shape", "9,2,64"], "--shape"),
        (["throughput", "--input-len", "0"], "--input-len: at least 1"),
        (["throughput", "--input-len", "300", *ENGINE], "max_model_len (256)"),
        (["step", "--streams", "0"], "--streams: at least 1"),
        (["step", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_other_commands_refuse_by_name_too(command: list[str], says: str, capsys) -> None:
    assert main(command) == 1
    assert says in capsys.readouterr().err
