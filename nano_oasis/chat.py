"""`python -m nano_oasis.chat`: a conversation in the terminal, with a model in this process or behind --url.

Owns: the conversation, its commands, and how replies appear. Must not know: templates, sampling, HTTP
beyond one POST. Reads piped input too: one message per line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console

from nano_oasis.cli import LoadProgress, add_engine_options, engine_config, make_parser
from nano_oasis.config import ConfigError, EngineConfig
from nano_oasis.request import SamplingParams

HELP = """\
/system TEXT  set the system prompt and start over (without TEXT: remove it)
/reset        forget the conversation, keep the system prompt
/help         this list
/exit         leave (so does Ctrl-D; Ctrl-C stops a reply)"""


SILENCE_S = 600  # a server that sends nothing for so long is given up; a long prompt may take minutes

# Only failures before there is a connection: later ones say what was lost.
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class ChatError(Exception):
    """A turn that failed, with a message for the person at the terminal."""


class Backend(Protocol):
    """Something that answers a list of messages with pieces of text."""

    async def open(self) -> str:
        """Get ready and return the model's name. Raises ChatError."""
        ...

    def reply(self, messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        """Pieces of the answer. Raises ChatError."""
        ...

    async def close(self) -> None: ...


class LocalBackend:
    """The model in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from nano_oasis.async_engine import AsyncEngine  # imports torch: only when it is needed

        self._engine = AsyncEngine(engine_config(args))
        self._params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=args.max_tokens,
            seed=args.sampling_seed,
        )

    async def open(self) -> str:
        try:
            with LoadProgress() as progress:
                await self._engine.start(progress)
        except (ValueError, OSError) as error:
            raise ChatError(f"cannot load the model: {error}") from None
        return self._engine.model_name

    async def reply(self, messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        try:
            stream = self._engine.submit(await self._engine.encode_chat(messages), self._params)
        except ValueError as error:  # RequestError, TemplateError
            raise ChatError(str(error)) from None
        try:
            async for event in stream:
                if event.finish_reason in ("error", "abort"):
                    raise ChatError(event.error or "the reply was aborted")
                yield event.text
        finally:
            stream.abort()

    async def close(self) -> None:
        await self._engine.shutdown(0)


class HttpBackend:
    """Any server with the OpenAI chat API; `url` is its base, with or without /v1."""

    def __init__(self, args: argparse.Namespace) -> None:
        _check_url(args.url)
        self._base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model: str | None = None if args.model == EngineConfig.model else args.model
        asked = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
        asked["seed"] = args.sampling_seed
        self._options = {name: value for name, value in asked.items() if value is not None}
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> str:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        if self._model is None:
            with _network_errors(self._base):
                async with self._session.get(self._base + "/models") as response:
                    await _check(response)
                    self._model = (await response.json())["data"][0]["id"]
        return str(self._model)

    async def reply(self, messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        assert self._session is not None, "call open() first"
        body = {"model": self._model, "messages": messages, "stream": True, **self._options}
        with _network_errors(self._base):
            async with self._session.post(self._base + "/chat/completions", json=body) as response:
                await _check(response)
                async for line in response.content:
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        raise ChatError(str(chunk["error"].get("message", chunk["error"])))
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _check_url(url: str) -> None:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, or a host name that cannot be one
        good = False
    if not good:
        raise ConfigError(f"--url: expected a URL like http://127.0.0.1:8000, got {url!r}")


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    raise ChatError(f"{response.status}: {text}")


@contextlib.contextmanager
def _network_errors(base: str) -> Iterator[None]:
    try:
        yield
    except _UNREACHABLE as error:
        raise ChatError(f"cannot reach {base}: {_reason(error)}") from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise ChatError(f"lost {base}: {_reason(error)}") from None
    except (aiohttp.ClientError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ChatError(f"{base} does not answer like an OpenAI server: {what}") from None


def _reason(error: Exception) -> str:
    """In the system's words where it has some: "Connection refused"."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        if error.errno and error.errno > 0:
            return os.strerror(error.errno)
        if error.strerror:  # of a failed look-up, whose numbers are not the system's
            return error.strerror
    return str(error) or type(error).__name__


@dataclasses.dataclass
class Conversation:
    """Messages so far. A turn is kept only when its reply has come."""

    system: str | None = None
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def messages(self, user: str) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": user}]

    def keep(self, user: str, reply: str) -> None:
        self.turns += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]


class Chat:
    """Reads lines, runs commands, prints replies as they come."""

    def __init__(self, backend: Backend, conversation: Conversation, console: Console) -> None:
        self.backend = backend
        self.conversation = conversation
        self.console = console

    def loop(self, runner: asyncio.Runner, read: Callable[[], str]) -> None:
        """Until /exit or the end of input. `read` raises EOFError there."""
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/exit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                try:
                    runner.run(self.turn(line))
                except KeyboardInterrupt:
                    self.console.print("\n(stopped)", style="dim")
                except ChatError as error:
                    self.console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)

    def command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/reset":
            self.conversation.turns = []
            self.console.print("(conversation forgotten)", style="dim")
        elif name == "/system":
            self.conversation.system = text.strip() or None
            self.conversation.turns = []
            self.console.print("(system prompt set)" if text.strip() else "(no system prompt)", style="dim")
        elif name == "/help":
            self.console.print(HELP, style="dim", markup=False)
        else:
            self.console.print(f"no command {name}; there are:\n{HELP}", style="red", markup=False)

    async def turn(self, user: str) -> None:
        """One message and its reply. Raises ChatError; then the conversation is as before."""
        began, pieces = time.monotonic(), []
        try:
            async with contextlib.aclosing(self.backend.reply(self.conversation.messages(user))) as reply:  # type: ignore[type-var]
                async for piece in reply:
                    pieces.append(piece)
                    # Model text is data: no markup, no colours, no line wrapping of our own.
                    self.console.out(piece, end="", highlight=False)
                    self.console.file.flush()
        finally:
            self.console.print()
        self.conversation.keep(user, "".join(pieces))
        if self.console.is_terminal:
            self.console.print(f"{time.monotonic() - began:.1f} s", style="dim")


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser("chat", "Chat in the terminal. Commands: /system TEXT, /reset, /help, /exit.")
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--url",
        help="base URL of an OpenAI-compatible server instead of a model in this process; --model then names "
        "the server's model (default: its first). A key is taken from OPENAI_API_KEY",
    )
    group.add_argument("--system", help="system prompt")
    # Tamer than the API's defaults: a small model rambles at temperature 1, and a reply must end.
    group.add_argument("--temperature", type=float, default=0.5, help="0 = greedy (default: 0.5)")
    group.add_argument("--top-p", type=float, default=0.95, help="(default: 0.95)")
    group.add_argument("--max-tokens", type=int, default=512, help="longest reply, in tokens (default: 512)")
    group.add_argument("--sampling-seed", type=int, metavar="SEED", help="makes replies repeatable")
    add_engine_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 at the end of input or /exit, 1 if there is no model to talk to."""
    parser = build_parser()
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        if args.url:
            _refuse_engine_options(args)
        backend: Backend = HttpBackend(args) if args.url else LocalBackend(args)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    with asyncio.Runner() as runner:
        try:
            name = runner.run(backend.open())
            if sys.stdin.isatty():
                console.print(f"{name} (/help for commands)", style="bold", markup=False)
            read = (lambda: input("> ")) if sys.stdin.isatty() else _read_line
            Chat(backend, Conversation(args.system), console).loop(runner, read)
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            runner.run(backend.close())
    return 0


def _refuse_engine_options(args: argparse.Namespace) -> None:
    """With --url they would change nothing. Raises ConfigError."""
    for option in dataclasses.fields(EngineConfig):
        if option.name != "model" and getattr(args, option.name) != option.default:
            raise ConfigError(
                f"{option.name} is an option of a model in this process; leave it out with --url"
            )


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


if __name__ == "__main__":
    sys.exit(main())
