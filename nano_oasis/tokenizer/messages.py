"""Chat messages: checked, brought into the one form templates expect, and kept from forging control tokens.

Owns: normalise_messages and ContentGuard. Must not know: templates, tokenizers, the server's types.
The caller's objects are never changed.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from nano_oasis.request import RequestError


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """A checked copy of a conversation, as templates expect it.

    `content` becomes a string: text parts are joined as they are, and what is absent or null (allowed for
    an assistant message with tool_calls) is "". The `arguments` of tool calls become mappings: a JSON object
    is parsed, "" and null mean none; any other text stays as it is. Raises RequestError(param="messages").
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise _error(f"messages must be a non-empty list of messages, got {_shown(messages)}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _error(f"{where} must be an object with role and content, got {_shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _error(f"{where}.role must be a non-empty string, got {_shown(role)}")
    # An explicit null means absent; templates test for the key, not for its value.
    copy = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in copy:
        copy["tool_calls"] = _tool_calls(copy["tool_calls"], f"{where}.tool_calls")
    if "content" in copy:
        copy["content"] = _text(copy["content"], f"{where}.content")
    elif role == "assistant" and copy.get("tool_calls"):
        copy["content"] = ""
    else:
        raise _error(f"{where}.content is missing: only an assistant message with tool_calls may omit it")
    return copy


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"{where} must be a string or a list of text parts, got {_shown(content)}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            given = f"type {_shown(kind)}" if isinstance(part, dict) else _shown(part)
            raise _error(f'{where}[{i}]: only parts of type "text" are supported, got {given}')
        if not isinstance(part.get("text"), str):
            raise _error(f"{where}[{i}].text must be a string, got {_shown(part.get('text'))}")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _error(f"{where} must be a list, got {_shown(calls)}")
    copies = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _error(f"{where}[{i}] must be an object with function.name, got {_shown(call)}")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        copies.append({**call, "function": {**function, "arguments": arguments}})
    return copies


def _arguments(arguments: Any, where: str) -> Any:
    """A mapping where there is one; templates loop over it, or print it as JSON themselves."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    if not isinstance(arguments, str):
        raise _error(f"{where} must be a JSON object, as text or as an object, got {_shown(arguments)}")
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # what a model wrote may be broken; it goes back to the model as it was
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else arguments


class ContentGuard:
    """Keeps text of a conversation that spells a control token from becoming one.

    `hide` replaces each such spelling by a placeholder of the same kind of text (private-use characters
    and digits, which trimming, splitting and JSON leave alone) before the template sees it; what the
    rendered prompt then spells, the template wrote; `reveal` puts the hidden spellings back. The
    placeholders hold a random number, so a client cannot write one.
    """

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._mark = f"\ue000{secrets.randbelow(10**18):018d}\ue001"
        self.hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        """A copy of strings, lists and dicts (keys too) with every spelling of a control token hidden."""
        if self._pattern is None:
            return value
        try:
            return self._hide(value, self._pattern)
        except RecursionError:
            raise _error("messages or tools are nested too deeply") from None

    def reveal(self, text: str) -> str:
        return re.sub(f"{self._mark}(\\d+)\ue002", lambda found: self.hidden[int(found[1])], text)

    def _hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(self._placeholder, value)
        if isinstance(value, (list, tuple)):
            return [self._hide(item, pattern) for item in value]
        if isinstance(value, dict):
            return {self._hide(key, pattern): self._hide(item, pattern) for key, item in value.items()}
        return value

    def _placeholder(self, found: re.Match[str]) -> str:
        self.hidden.append(found[0])
        return f"{self._mark}{len(self.hidden) - 1}\ue002"


def _error(message: str) -> RequestError:
    return RequestError(message, "messages")


def _shown(value: Any) -> str:
    """A value short enough for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
