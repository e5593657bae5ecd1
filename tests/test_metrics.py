"""Metrics: names and values of the exposition, isolation of engines, and that a fault stays inside (B080)."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nano_oasis.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Sample name (with the finish reason, where there is one) -> value."""
    out = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for s in family.samples:
            reason = s.labels.get("finished_reason")
            if "le" not in s.labels:
                out[s.name.removeprefix("nano_oasis:") + (f"/{reason}" if reason else "")] = s.value
    return out


def test_events_become_numbers() -> None:
    m = Metrics("tiny")
    m.request_received()
    m.request_received()
    m.prefix_cache(query_tokens=32, hit_tokens=16)
    m.step(2, 1, 3, 12, prompt_tokens=16, generation_tokens=1, step_s=0.01)
    m.first_token(0.02)
    m.inter_token(0.003)
    m.preempted(2)
    m.request_finished("stop", prompt_tokens=32, output_tokens=5, e2e_s=0.5)
    got = values(m)
    assert got["num_requests_running"] == 2
    assert got["num_requests_waiting"] == 1
    assert got["kv_cache_usage_perc"] == 0.25
    assert got["prompt_tokens_total"] == 16
    assert got["generation_tokens_total"] == 1
    assert got["prefix_cache_queries_total"] == 32
    assert got["prefix_cache_hits_total"] == 16
    assert got["num_preemptions_total"] == 2
    assert got["request_received_total"] == 2
    assert got["request_success_total/stop"] == 1
    assert got["request_success_total/abort"] == 0
    assert got["time_to_first_token_seconds_count"] == 1
    assert got["request_generation_tokens_sum"] == 5
    assert got["e2e_request_latency_seconds_sum"] == 0.5


def test_b080_gauges_return_to_zero_and_an_update_without_tokens_is_no_step() -> None:
    m = Metrics("tiny")
    m.step(5, 3, 10, 10, 0, 5, 0.01)
    m.step(0, 0, 0, 10, 0, 0, 0.0)
    got = values(m)
    assert got["num_requests_running"] == got["num_requests_waiting"] == got["kv_cache_usage_perc"] == 0
    assert got["step_seconds_count"] == 1


def test_b080_a_fault_is_logged_once_and_never_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    m = Metrics("tiny")

    def boom(*_: object) -> None:
        raise RuntimeError("metrics backend is broken")

    monkeypatch.setattr(m, "_running", type("Broken", (), {"set": boom})())
    m.preempted(-1)  # a counter asked to go down
    m.step(1, 1, 1, 1, 1, 1, 1.0)
    m.request_received()
    assert values(m)["request_received_total"] == 1
    assert values(m)["num_preemptions_total"] == 0
    assert len([r for r in caplog.records if "serving goes on" in r.message]) == 1


def test_two_engines_share_no_counters() -> None:
    a, b = Metrics("a"), Metrics("b")
    a.request_received()
    assert values(a)["request_received_total"] == 1
    assert values(b)["request_received_total"] == 0
