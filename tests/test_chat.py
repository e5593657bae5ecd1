"""The terminal chat: commands, history, failures; against a fake engine in-process and against a server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from live_server import LiveServer, chat_ids
from rich.console import Console

from nano_oasis import chat

pytest_plugins = ["live_server"]


class Echo:
    """A backend that repeats what it is told, and remembers the messages it saw."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []

    async def open(self) -> str:
        return "echo"

    async def reply(self, messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        self.seen.append(messages)
        user = messages[-1]["content"]
        if user == "fail":
            raise chat.ChatError("it broke")
        yield "you "
        if user == "interrupt":
            raise KeyboardInterrupt
        yield f"said [{user}]"

    async def close(self) -> None: ...


def converse(*lines: str, backend: Any = None, system: str | None = None) -> tuple[str, Any]:
    """What the terminal shows, and the backend."""
    backend = backend or Echo()
    out = io.StringIO()
    left = list(lines)

    def read() -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    with asyncio.Runner() as runner:
        runner.run(backend.open())
        conversation = chat.Conversation(system)
        chat.Chat(backend, conversation, Console(file=out, width=80)).loop(runner, read)
        runner.run(backend.close())
    return out.getvalue(), backend


def test_turns_build_on_each_other() -> None:
    out, backend = converse("one", "", "two")
    assert out == "you said [one]\nyou said [two]\n"  # brackets are text, not markup
    assert [m["content"] for m in backend.seen[1]] == ["one", "you said [one]", "two"]
    assert [m["role"] for m in backend.seen[1]] == ["user", "assistant", "user"]


def test_commands() -> None:
    out, backend = converse(
        "one", "/reset", "two", "/system be brief", "three", "/system", "four", "/exit", "five"
    )
    contents = [[m["content"] for m in messages] for messages in backend.seen]
    assert contents == [["one"], ["two"], ["be brief", "three"], ["four"]]
    assert backend.seen[2][0]["role"] == "system"
    assert "five" not in out
    assert "no command /nope" in converse("/nope")[0] and not converse("/nope")[1].seen
    assert "/reset" in converse("/help")[0]
    assert converse("hi", system="be kind")[1].seen[0][0] == {"role": "system", "content": "be kind"}


def test_a_failed_turn_leaves_the_conversation_as_it_was() -> None:
    out, backend = converse("one", "fail", "two")
    assert "error: it broke" in out
    assert [m["content"] for m in backend.seen[2]] == ["one", "you said [one]", "two"]


def test_an_interrupted_reply_is_dropped() -> None:
    out, backend = converse("interrupt", "two")
    assert "you \n" in out and "(stopped)" in out
    assert [m["content"] for m in backend.seen[1]] == ["two"]


@pytest.fixture
def options() -> Any:
    return chat.build_parser().parse_args(["--max-tokens", "5", "--sampling-seed", "3"])


def test_against_a_server(live: LiveServer, options: Any) -> None:
    live.model.force(chat_ids("hello"), list("héllo".encode()))
    for url in (live.url, live.url + "/v1", live.url + "/v1/"):
        options.url = url
        backend = chat.HttpBackend(options)

        async def once(backend: chat.HttpBackend = backend) -> tuple[str, str]:
            name = await backend.open()
            try:
                pieces = [p async for p in backend.reply([{"role": "user", "content": "hello"}])]
            finally:
                await backend.close()
            return name, "".join(pieces)

        assert asyncio.run(once()) == ("fake", "héll")  # five tokens are five bytes


def test_errors_of_a_server_are_shown(live: LiveServer, options: Any) -> None:
    options.url, options.model = live.url, "no-such-model"
    out, _ = converse("hello", backend=chat.HttpBackend(options))
    assert out == "\nerror: 404: the model 'no-such-model' does not exist; this server has 'fake'\n"
    options.url = "http://127.0.0.1:9"
    out, _ = converse("hello", backend=chat.HttpBackend(options))
    assert out == "\nerror: cannot reach http://127.0.0.1:9/v1: Connection refused\n"


@pytest.fixture
def fake_local(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from fake_engine import FakeEngine

    monkeypatch.setattr("nano_oasis.async_engine.AsyncEngine", FakeEngine)
    yield


def run_main(monkeypatch: pytest.MonkeyPatch, text: str, *args: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return chat.main(args)


def test_in_process_with_piped_input(
    fake_local: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "hello\nhello again\n", "--max-tokens", "5", "--temperature", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(lines)
    assert run_main(monkeypatch, "hello\n/exit\nx\n", "--max-tokens", "5", "--temperature", "0") == 0
    assert capsys.readouterr().out.splitlines() == lines[:1]


def test_a_prompt_that_does_not_fit_is_an_error_not_the_end(
    fake_local: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "x" * 5000 + "\nhello\n", "--max-tokens", "2") == 0
    _, error, reply = capsys.readouterr().out.splitlines()
    assert "context limit" in error and reply


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--block-size", "0"], "block_size"),
        (["--url", "http://127.0.0.1:9", "--threads", "2"], "leave it out with --url"),
        (
            ["--url", "127.0.0.1:8000"],
            "--url: expected a URL like http://127.0.0.1:8000, got '127.0.0.1:8000'",
        ),
        (["--url", "http://127.0.0.1:70000"], "--url: expected a URL"),
        (["--url", "http://" + "a" * 80], "--url: expected a URL"),
        (["--nope"], "unrecognized arguments"),
    ],
)
def test_bad_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        chat.main(args)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_no_server_is_exit_code_1() -> None:
    command = [sys.executable, "-m", "nano_oasis.chat", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: cannot reach http://127.0.0.1:9/v1: Connection refused\n"


@pytest.fixture
def answering() -> Iterator[Any]:
    """Gives the URL of a server that sends the same bytes to every connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(answer: bytes) -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        def start(answer: bytes) -> str:
            threading.Thread(target=serve, args=(answer,), daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start
        listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake accept()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "lost {}/v1: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "lost {}/v1: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "{}/v1 does not answer like an OpenAI server: "),
        (b"SSH-2.0\r\n", "{}/v1 does not answer like an OpenAI server: "),
    ],
)
def test_something_else_listens_there(
    answering: Any, answer: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = answering(answer)
    assert chat.main(["--url", url]) == 1
    assert capsys.readouterr().err.startswith("error: " + message.format(url))


def test_a_silent_server_is_given_up(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options.model = "any"
        out, _ = converse("hello", "again", backend=chat.HttpBackend(options))
    assert out.count(f"error: lost {options.url}/v1: Timeout on reading data") == 2


def test_replies_are_bounded_and_tame_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    args = chat.build_parser().parse_args(["--url", "http://x"])
    backend = chat.HttpBackend(args)
    assert backend._options == {"temperature": 0.5, "top_p": 0.95, "max_tokens": 512}
    params = chat.LocalBackend(chat.build_parser().parse_args([]))._params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.95, 512)
    with pytest.raises(SystemExit):
        chat.main(["--help"])
    shown = capsys.readouterr().out
    assert "(default: 512)" in shown and "(default: 0.5)" in shown and "(default: 0.95)" in shown


def test_piped_input_ends_with_the_defaults(
    fake_local: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake model never says an end token: only the limit ends a reply."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nworld"))
    assert chat.main(["--max-model-len", "4096", "--num-device-blocks", "512"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert 512 <= len(first) < 512 * 6 and second  # a token is a byte or a short word
