"""The web application: its state, its routes, and how every error becomes JSON.

Owns: the HTTP library's settings, HTTP status of failures, readiness.
Must not know: how an endpoint builds its reply, or how the engine works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from nano_oasis.openai_api import ApiError
from nano_oasis.request import EngineDead, RequestError

if TYPE_CHECKING:
    from nano_oasis.async_engine import AsyncEngine
    from nano_oasis.build import Progress

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY = 32 * 2**20

# Why the engine takes no requests, by its health word; an engine that is only "stuck" may come back.
_REFUSING = {
    "loading": "the model is still loading",
    "draining": "the server is shutting down",
    "stopped": "the server is shutting down",
    "dead": "the engine has died; restart the server",
}


@dataclass
class ServerState:
    """What all handlers share. `engine` is None until its code is imported; `loaded` once it is warm."""

    engine: AsyncEngine | None = None
    loaded: bool = False
    draining: bool = False
    max_body: int = DEFAULT_MAX_BODY
    created: int = field(default_factory=lambda: int(time.time()))
    longest_token: int = 0  # of the vocabulary, in bytes

    async def load(self, engine: AsyncEngine, progress: Progress | None = None) -> None:
        """Start `engine` and serve it. Raises what engine.start raises."""
        self.engine = engine
        await engine.start(progress)
        tokenizer = engine.tokenizer
        self.longest_token = await asyncio.to_thread(
            lambda: max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        )
        self.loaded = True

    def health(self) -> str:
        """ok, stuck, loading, draining, stopped or dead."""
        if self.draining:
            return "draining"
        if self.engine is None or (not self.loaded and self.engine.health() == "ok"):
            return "loading"
        return self.engine.health()

    def ready_engine(self) -> AsyncEngine:
        """The engine, if it takes requests. Raises ApiError(503)."""
        health = self.health()
        if health in _REFUSING or self.engine is None:
            raise ApiError(503, _REFUSING[health], code=health)
        return self.engine


STATE = web.AppKey("state", ServerState)


def make_runner(state: ServerState, shutdown_timeout: float = 60.0) -> web.AppRunner:
    """The application, with the settings its parts count on: handlers are cancelled when their client is
    gone, compressed bodies reach body.py as they are, and an ending server waits `shutdown_timeout` seconds
    for open calls."""
    from nano_oasis.server.handlers import ROUTES

    app = web.Application(middlewares=[_errors_as_json])
    app[STATE] = state
    app.add_routes(ROUTES)
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=shutdown_timeout,
    )


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    response = web.Response(body=error.body(), status=error.status, content_type="application/json")
    if error.status == 503:
        response.headers["Retry-After"] = "1"
    if error.code in ("draining", "stopped", "body_too_large", "unreadable_body"):
        response.force_close()
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(_http_error(request, error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:  # the client is gone: there is nobody to answer
        raise
    except Exception as error:
        return error_response(as_api_error(error, request.app[STATE]))


def as_api_error(error: Exception, state: ServerState) -> ApiError:
    """Any failure of a call in the one error shape; what nobody foresaw is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):  # also the refusal of a chat template
        return ApiError(400, str(error), error.param, "invalid_value")
    if isinstance(error, EngineDead) or state.draining:
        health = state.health()
        return ApiError(503, _REFUSING.get(health, str(error)), code=health)
    log.error("a call failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    where = f"{request.method} {request.path}"
    if error.status == 404:
        return ApiError(404, f"there is no route {where}", code="not_found")
    if error.status == 405:
        allowed = ", ".join(sorted(getattr(error, "allowed_methods", ())))
        return ApiError(405, f"{where} is not allowed; use {allowed}", code="method_not_allowed")
    return ApiError(error.status, f"{where}: {error.reason}", code="http_error")
