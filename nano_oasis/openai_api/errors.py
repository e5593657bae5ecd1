"""The one error shape of the API, {"error": {message, type, param, code}}, and its HTTP status.

Owns: ApiError. Must not know: sockets, the engine.
"""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A call that gets an error reply. `code` is a stable word for programs, `message` is for people."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})
