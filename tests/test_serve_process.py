"""The server as a process, on the fake engine: the port, loading, signals and exit codes."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import parse_events, until

TESTS = Path(__file__).parent
SERVE = [sys.executable, "-m", "nano_oasis.serve"]
FAKE = [sys.executable, str(TESTS / "fake_engine.py"), "--max-model-len", "4096"]


class Process:
    """A started server, its output, and the port it printed."""

    def __init__(self, command: list[str], *args: str, **env: str) -> None:
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self.popen = subprocess.Popen(
            [*command, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        )
        self.out = ""
        self.err = ""

    def read_until(self, pattern: str, seconds: float = 40) -> re.Match[str]:
        """Read output (either stream) until the pattern shows."""
        assert self.popen.stdout and self.popen.stderr
        streams = {self.popen.stdout.fileno(): "out", self.popen.stderr.fileno(): "err"}
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.err + self.out)):
            ready, _, _ = select.select(list(streams), [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {pattern!r} within {seconds} s in {self.err + self.out!r}"
            for fd in ready:
                data = os.read(fd, 65536).decode()
                assert data or self.popen.poll() is None, (self.popen.poll(), self.err, self.out)
                setattr(self, streams[fd], getattr(self, streams[fd]) + data)
        return found

    def listening(self) -> int:
        self.port = int(self.read_until(r"listening on http://127\.0\.0\.1:(\d+) ")[1])
        return self.port

    def ready(self) -> None:
        self.listening()
        self.read_until(r"KV cache .*\n")

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def finish(self, seconds: float = 30) -> tuple[int, str]:
        """(exit code, stderr)"""
        out, err = self.popen.communicate(timeout=seconds)
        self.out, self.err = self.out + out, self.err + err
        return self.popen.returncode, self.err


@pytest.fixture
def start() -> Iterator[Any]:
    made: list[Process] = []

    def make(command: list[str], *args: str, **env: str) -> Process:
        made.append(Process(command, *args, **env))
        return made[-1]

    yield make
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


def test_b078_a_taken_port_is_reported_before_anything_is_loaded(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        code, err = start(SERVE, "--port", str(port), "--model", "/no/such/model").finish()
        took = time.monotonic() - began
    reason = "Address already in use; choose another port with --port (0 = any free one)"
    assert code == 1 and err == f"error: cannot listen on 127.0.0.1:{port}: {reason}\n"
    assert took < 3, took


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["--host", "a" * 80], "a:8000: not a host name (its parts have 1 to 63 characters)"),
        (["--host", "a..b"], "cannot listen on a..b:8000: not a host name"),
        (["--port", "70000"], "must be an integer between 0 and 65535"),
        (["--prot", "1"], "unrecognized arguments: --prot"),
        (["--max-num"], "unrecognized arguments: --max-num"),
        (["--block-size", "0"], "block_size: must be between 1 and 1024, got 0"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--device-kv-memory", "lots"], "expected a number of bytes or a string like '2GiB', got 'lots'"),
        (["--max-body-size", "-1"], "expected a number of bytes"),
        (["--shutdown-timeout", "nan"], "must be seconds between 0 and 86400"),
    ],
)
def test_bad_command_lines(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from nano_oasis import serve

    try:
        code: Any = serve.main(args)
    except SystemExit as error:
        code = error.code
    assert code in (1, 2) and message in capsys.readouterr().err


def test_options_reach_the_settings() -> None:
    from nano_oasis import cli, serve
    from nano_oasis.config import EngineConfig

    words = "--no-enable-prefix-caching --max-num-seqs 7 --device-kv-memory 2GiB --stall-timeout 5"
    args = serve.build_parser().parse_args([*words.split(), "--max-body-size", "1MiB"])
    config = cli.engine_config(args)
    assert config == EngineConfig(
        enable_prefix_caching=False, max_num_seqs=7, device_kv_memory="2GiB", stall_timeout=5
    )
    assert args.max_body_size == 2**20
    assert cli.engine_config(serve.build_parser().parse_args([])) == EngineConfig()


def test_every_option_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    from nano_oasis import serve
    from nano_oasis.config import EngineConfig

    with pytest.raises(SystemExit) as done:
        serve.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(EngineConfig):
        assert "--" + field.name.replace("_", "-") in text


def test_two_addresses_of_a_host_name_share_the_port() -> None:
    from nano_oasis.serve import bind, url_of

    sockets = bind("localhost", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", url_of(sockets[0]))
    finally:
        for sock in sockets:
            sock.close()


def test_a_failing_load_ends_the_process(start: Any) -> None:
    process = start(FAKE, "--port", "0", FAKE_LOAD_ERROR="weights.gguf: tensor blk.0 is cut off")
    code, err = process.finish(40)
    assert code == 1
    assert "error: cannot serve smollm2: weights.gguf: tensor blk.0 is cut off" in err
    assert "Traceback" not in err and not process.out


def test_b073_b074_503_while_loading_and_sigterm_then(start: Any) -> None:
    process = start(FAKE, "--port", "0", FAKE_LOAD_S="60")
    process.listening()
    for method, path in (("GET", "/health"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        status, body = process.call(method, path)
        assert status == 503 and json.loads(body)["error"]["code"] == "loading"
    process.popen.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, err = process.finish()
    assert code == 0 and "Traceback" not in err
    assert time.monotonic() - began < 5


def test_b073_sigterm_drains_then_aborts(start: Any) -> None:
    """A short stream ends normally, a long one gets an error event, late requests are turned away."""
    process = start(FAKE, "--port", "0", "--shutdown-timeout", "2", FAKE_STEP_S="0.02", FAKE_LOAD_S="0.3")
    process.listening()
    assert process.call("GET", "/health")[0] == 503
    until(lambda: process.call("GET", "/health")[0] == 200, 20)
    status, body = process.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert status == 200, body
    process.read_until(r"nano_oasis [\d.]+: fake, float64 on cpu, KV cache [\d,]+ tokens \(.*\), .*/v1\n")
    results: dict[str, tuple[int, bytes]] = {}

    def run(name: str, tokens: int, stream: bool) -> None:
        body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        results[name] = process.call("POST", "/v1/completions", body)

    jobs = {"short": (30, True), "long": (4000, True), "plain": (4000, False)}
    threads = [threading.Thread(target=run, args=(name, *job)) for name, job in jobs.items()]
    idle = http.client.HTTPConnection("127.0.0.1", process.port, timeout=10)
    idle.request("GET", "/health")
    idle.getresponse().read()
    for thread in threads:
        thread.start()
    until(lambda: b'num_requests_running{model_name="fake"} 3.0' in process.call("GET", "/metrics")[1], 10)
    process.popen.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.read_until("shutting down")
    idle.request("POST", "/v1/completions", '{"prompt": "late"}')
    late = idle.getresponse()
    assert late.status == 503 and json.loads(late.read())["error"]["code"] == "draining"
    with pytest.raises(ConnectionRefusedError):
        process.call("GET", "/health")
    code, err = process.finish()
    assert code == 0 and "Traceback" not in err
    assert 1.5 < time.monotonic() - began < 8
    for thread in threads:
        thread.join()
    assert parse_events(results["short"][1].decode())[-1] == "[DONE]"
    events = parse_events(results["long"][1].decode())
    assert events[-1]["error"]["code"] == "aborted"
    assert not [e for e in events[:-1] if e["choices"][0]["finish_reason"]]
    assert results["plain"][0] == 503 and json.loads(results["plain"][1])["error"]["code"] == "aborted"


def test_b073_b078_second_signal_and_restart_on_the_same_port(start: Any) -> None:
    process = start(FAKE, "--port", "0", FAKE_STEP_S="0.05")
    process.ready()
    with socket.create_connection(("127.0.0.1", process.port)) as sock:
        body = b'{"prompt": "a", "max_tokens": 4000, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        assert sock.recv(100)
        process.popen.send_signal(signal.SIGINT)
        process.read_until("shutting down")
        process.popen.send_signal(signal.SIGINT)
        code, _ = process.finish(3)
        assert code == 128 + signal.SIGINT
        again = start(SERVE, "--port", str(process.port))  # the old connection is still open
        assert again.listening() == process.port
        again.popen.kill()
