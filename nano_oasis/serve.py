"""`python -m nano_oasis.serve`: the command line, the port, loading, signals and the exit code.

Owns: the life of the server process. Must not know: endpoints, or how the engine works.

    bind ──> answer 503 ──> load ──> serve ──> SIGTERM: close the port, drain, abort the rest, exit 0
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import functools
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import uvloop
from aiohttp import web

import nano_oasis
from nano_oasis.cli import LoadProgress, add_engine_options, engine_config, make_parser
from nano_oasis.config import ConfigError, EngineConfig, format_bytes, parse_bytes
from nano_oasis.server.app import DEFAULT_MAX_BODY, ServerState, make_runner

if TYPE_CHECKING:
    from nano_oasis.async_engine import AsyncEngine

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections the kernel holds while we are busy accepting others
FLUSH_S = 3.0  # after the drain: for last events to reach their clients

MakeEngine = Callable[[EngineConfig], "AsyncEngine"]


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser("serve", "Serve a model over the OpenAI API.")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=_port, default=8000, help="port; 0 = any free one, printed (default: 8000)"
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="on SIGTERM: how long running requests may finish (default: 30)",
    )
    group.add_argument(
        "--max-body-size",
        type=_bytes,
        default=DEFAULT_MAX_BODY,
        metavar="BYTES",
        help="largest request body, in bytes or like 64MiB (default: 32MiB)",
    )
    add_engine_options(parser)
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be an integer between 0 and 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be seconds between 0 and 86400, got {text!r}")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host` ("localhost" has two). Raises OSError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # from the encoding of host names, which has limits of its own
        raise OSError(errno.EINVAL, "not a host name (its parts have 1 to 63 characters)") from None
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, address in dict.fromkeys((f[0], f[4]) for f in found):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # no wait after a crash
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = sockets[0].getsockname()[1] if sockets and not port else port
            sock.bind((address[0], chosen, *address[2:]))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            # A host name may list an address family this machine lacks; a taken port is a failure.
            failure = failure or error
            continue
        sockets.append(sock)
    if failure is not None and (not sockets or failure.errno == errno.EADDRINUSE):
        for sock in sockets:
            sock.close()
        raise failure
    return sockets


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """One server process, from bound sockets to exit code."""

    def __init__(
        self, config: EngineConfig, sockets: Sequence[socket.socket], args: argparse.Namespace
    ) -> None:
        self.config = config
        self.sockets = sockets
        self.shutdown_timeout: float = args.shutdown_timeout
        self.state = ServerState(max_body=args.max_body_size)
        self._stop = asyncio.Event()

    async def run(self, make_engine: MakeEngine | None = None) -> int:
        """Serve until a signal. Returns the exit code: 0 after a signal, 1 if loading failed."""
        self._handle_signals()
        runner = make_runner(self.state, FLUSH_S)
        await runner.setup()
        sites = [web.SockSite(runner, sock, backlog=BACKLOG) for sock in self.sockets]
        for site in sites:
            await site.start()
        code = await self._load_or_stop(make_engine)
        if code == 0:
            await self._stop.wait()
        self.state.draining = True
        for site in sites:
            await site.stop()  # new connections are refused; open ones get 503
        if self.state.engine is not None and self.state.loaded:
            print("shutting down", file=sys.stderr, flush=True)
            await self.state.engine.shutdown(self.shutdown_timeout)
        await runner.cleanup()
        return code

    async def _load_or_stop(self, make_engine: MakeEngine | None) -> int:
        loading = asyncio.create_task(self._load(make_engine))
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()  # takes the progress bar off the terminal; the thread cannot be stopped
            await asyncio.wait((loading,), timeout=1)
            return 0
        stop.cancel()
        error = loading.exception()
        if error is None:
            return 0
        if not isinstance(error, (ValueError, OSError)):  # not a complaint about what the user gave
            log.error("loading failed", exc_info=error)
        print(f"error: cannot serve {self.config.model}: {error}", file=sys.stderr, flush=True)
        return 1

    async def _load(self, make_engine: MakeEngine | None) -> None:
        url = url_of(self.sockets[0])
        print(f"listening on {url} (503 until the model is loaded)", file=sys.stderr, flush=True)
        if make_engine is None:  # importing torch takes seconds: not on the event loop
            module = await asyncio.to_thread(importlib.import_module, "nano_oasis.async_engine")
            make_engine = module.AsyncEngine
        engine = make_engine(self.config)
        with LoadProgress() as progress:
            await self.state.load(engine, progress)
        info = engine.info
        kv = f"KV cache {info.kv_tokens:,} tokens ({format_bytes(info.kv_bytes)})"
        if info.kv_mode != "dense":
            kv = (
                f"oasis KV: {info.kv_tokens:,} tokens in host memory ({format_bytes(info.host_kv_bytes)}), "
                f"{format_bytes(info.kv_bytes)} on the device"
            )
        print(
            f"nano_oasis {nano_oasis.__version__}: {info.model_name}, {info.dtype} on {info.device}, "
            f"{kv}, context {info.max_model_len:,} tokens, {url}/v1",
            flush=True,
        )

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, functools.partial(self._on_signal, number))

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():  # the second one: leave at once
            os._exit(128 + number)
        self._stop.set()


def main(argv: Sequence[str] | None = None, make_engine: MakeEngine | None = None) -> int:
    """Returns the exit code. Must be followed by leave(), because a load cannot be interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # It reports what clients send wrong; our own failures are caught and logged by server/app.py.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        config = engine_config(args)
    except ConfigError as error:
        parser.error(str(error))
    try:
        sockets = bind(args.host, args.port)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "; choose another port with --port (0 = any free one)" if taken else ""
        print(f"error: cannot listen on {args.host}:{args.port}: {error.strerror}{advice}", file=sys.stderr)
        return 1
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    async def run() -> int:
        return await Server(config, sockets, args).run(make_engine)

    return loop.run_until_complete(run())


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads: one that is loading a model would hold the process up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
