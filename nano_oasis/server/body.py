"""Reads the body of a JSON call.

Owns: content types, compression, the size limit, and the refusal of each. Must not know: what a body says.
The runner leaves compressed bodies as they are (app.make_runner), so that these refusals are JSON too.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from typing import Any

from aiohttp import web

from nano_oasis.openai_api import ApiError
from nano_oasis.server.app import STATE

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib's word for: look at the header to see which of the two it is


async def read_body(request: web.Request) -> bytes:
    """The whole body, unpacked.

    Raises ApiError: 415 (neither JSON nor a compression we know), 413 (larger than the limit, packed or
    unpacked; the rest is not read), 400 (a bad chunk, or not what its Content-Encoding says).
    """
    _check_type(request)
    unzip = _unzipper(request)
    limit = request.app[STATE].max_body
    announced = request.content_length or 0
    parts: list[bytes] = []
    packed_size = size = 0
    while max(announced, packed_size, size) <= limit:
        try:
            packed = await request.content.readany()
        except web.RequestPayloadError as error:
            raise ApiError(400, f"the body cannot be read: {error}", code="unreadable_body") from None
        if not packed:
            if unzip is not None and not unzip.eof:
                raise _not_packed(request, "it is cut off")
            return b"".join(parts)
        part = packed if unzip is None else await _unpack(request, unzip, packed, limit + 1 - size)
        packed_size += len(packed)
        size += len(part)
        parts.append(part)
    message = f"the body is larger than the limit of {limit} bytes (--max-body-size)"
    raise ApiError(413, message, code="body_too_large")


def _check_type(request: web.Request) -> None:
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind and not re.fullmatch(r"(application|text)/([\w.-]+\+)?json", kind):
        message = f"the body must be JSON (Content-Type: application/json), got {kind!r}"
        raise ApiError(415, message, code="unsupported_media_type")


def _unzipper(request: web.Request) -> Any:
    """zlib's decompressor, or None for a body that is sent as it is."""
    encoding = _encoding(request)
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "deflate"):
        message = f"Content-Encoding {encoding!r} is not supported; use gzip, deflate, or none"
        raise ApiError(415, message, code="unsupported_media_type")
    return zlib.decompressobj(_GZIP_OR_ZLIB)


async def _unpack(request: web.Request, unzip: Any, packed: bytes, room: int) -> bytes:
    """Up to `room` bytes; on a thread, because a few bytes may unpack to megabytes."""
    try:
        part = await asyncio.to_thread(unzip.decompress, packed, room)
    except zlib.error as error:
        raise _not_packed(request, str(error)) from None
    if unzip.unused_data:
        raise _not_packed(request, "there is more after its end")
    return part


def _encoding(request: web.Request) -> str:
    return ", ".join(request.headers.getall("Content-Encoding", [])).strip().lower()


def _not_packed(request: web.Request, why: str) -> ApiError:
    return ApiError(400, f"the body cannot be read as {_encoding(request)}: {why}", code="unreadable_body")
