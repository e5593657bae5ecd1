"""engine.py when things go wrong: refusals, containment, a dead or stalled loop, stopping."""

import threading
import time

import pytest
from fakes import VOCAB, Caller, FakeModel, make_engine, run, same, solo, turn

from nano_oasis.engine import EngineDead
from nano_oasis.request import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ([], "prompt", "at least one token"),
        ([1] * 256, "prompt", "256 tokens, but the context limit is 256"),
        ([VOCAB], "prompt", "between 0 and 63"),
        ([-1], "prompt", "between 0 and 63"),
        ([True], "prompt", "between 0 and 63"),
    ],
)
def test_requests_that_can_never_run_are_refused_at_once(prompt, param, words):
    engine = make_engine()
    with pytest.raises(RequestError, match=words) as caught:
        engine.submit(prompt, SamplingParams(), print)
    assert caught.value.param == param and engine.num_live == 0


def test_B031_a_failing_step_ends_only_the_guilty_request():
    model = FakeModel()
    engine = make_engine(model=model)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    good = [Caller(engine, [i, 2, 3], params) for i in range(3)]
    model.fail_on = 42
    bad = Caller(engine, [42, 2, 3], params)
    run(engine, bad, *good)
    assert [e.finish_reason for e in bad.events] == ["error"] and "injected step failure" in bad.error
    model.fail_on = None
    for i, c in enumerate(good):
        same(c.outputs, solo([i, 2, 3], params))
    assert engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("where", ["detokenise", "sample"])
def test_B031_a_fault_in_one_request_stays_there(where, monkeypatch):
    engine = make_engine()
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    good, bad = Caller(engine, [1, 2, 3], params), Caller(engine, [4, 2, 3], params)
    guilty = bad.submission.requests[0]
    if where == "detokenise":
        monkeypatch.setattr(guilty.text, "push", lambda *a: 1 / 0)
    else:
        whole = type(engine.runner.sampler).__call__

        def sample(self, logits, requests, ahead=None):
            return 1 / 0 if guilty in requests else whole(self, logits, requests, ahead)

        monkeypatch.setattr(type(engine.runner.sampler), "__call__", sample)
    run(engine, good, bad)
    assert "ZeroDivisionError" in bad.error and good.error is None
    monkeypatch.undo()
    same(good.outputs, solo([1, 2, 3], params))


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def test_B031_a_dead_loop_tells_everyone(monkeypatch):
    engine = make_engine()
    events = []
    engine.submit([1, 2], SamplingParams(max_tokens=500, ignore_eos=True, n=2), events.append)
    monkeypatch.setattr(engine.scheduler, "plan", lambda: 1 / 0)
    engine.start()
    wait_for(lambda: len(events) == 2)
    assert {e.finish_reason for e in events} == {"error"} and "engine died" in events[0].error
    assert engine.health() == "dead"
    with pytest.raises(EngineDead, match="dead"):
        engine.submit([1], SamplingParams(), print)


def test_B074_a_stalled_loop_is_reported(monkeypatch):
    engine = make_engine(stall_timeout=0.05)
    release = threading.Event()
    plan = engine.scheduler.plan
    monkeypatch.setattr(engine.scheduler, "plan", lambda: (release.wait(10), plan())[1])
    engine.start()
    assert engine.health() == "ok"
    events = []
    engine.submit([1, 2], SamplingParams(max_tokens=1), events.append)
    wait_for(lambda: engine.health() == "stuck")
    release.set()
    wait_for(lambda: events and engine.health() == "ok")
    engine.stop()
    assert engine.health() == "stopped"


def test_B073_stop_drains_then_aborts():
    engine = make_engine(num_blocks=4000)
    engine.start()
    short, long = [], []
    engine.submit([1, 2], SamplingParams(max_tokens=5, ignore_eos=True), short.append)
    engine.submit([1, 2], SamplingParams(max_tokens=15000, ignore_eos=True), long.append)
    engine.stop(timeout=0.3)
    assert short[-1].finish_reason == "length" and long[-1].finish_reason == "abort"
    with pytest.raises(EngineDead):
        engine.submit([1], SamplingParams(), print)


def test_B080_gauges_return_to_zero_after_aborts_without_a_further_step():
    engine = make_engine()
    callers = [Caller(engine, [i, 1], SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(20)]
    turn(engine)
    for c in callers:
        engine.abort(c.submission)
    engine._take_inbox()
    text = engine.metrics.render().decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'nano_oasis:{name}{{model_name="fake"}} 0.0' in text
    assert 'finished_reason="abort"' in text


def test_a_request_that_cannot_be_scheduled_is_an_error_not_a_hang():
    engine = make_engine(num_blocks=4, block_size=4, max_model_len=64)  # a limit the pool cannot keep
    c = Caller(engine, [1] * 30, SamplingParams(max_tokens=1))
    run(engine, c, limit=5)
    assert "does not fit the KV pool" in c.error
