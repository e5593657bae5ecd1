"""Chat templates: jinja2 in a sandbox, with the helpers and white-space rules that templates expect.

Owns: ChatTemplate and its environment. Must not know: tokens, files, how messages are checked.

Templates come with models and are code from strangers: the sandbox keeps them from Python's internals and
from changing their inputs, and a budget on loop items and on output keeps a runaway one bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_oasis.request import RequestError

MAX_LOOP_ITEMS = 1_000_000  # items of all range() calls of one rendering together
MAX_OUTPUT = 1 << 26  # characters


class TemplateError(RequestError):
    """The template refused the conversation, or failed on it. The message is the template's own."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "messages")


class ChatTemplate:
    """A compiled template, or several under names: "default", and "tool_use" for requests with tools.

    `variables` are known to every rendering (bos_token, eos_token ...). Raises jinja2.TemplateSyntaxError.
    """

    def __init__(self, source: str | Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self.source = sources.get("default") or next(iter(sources.values()))
        self._variables = dict(variables or {})
        environment = _environment()
        self._templates = {name: environment.from_string(text) for name, text in sources.items()}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises TemplateError with the template's message."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        context = {"documents": None, **self._variables, **(variables or {})}
        context |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        parts, length = [], 0
        try:
            for part in template.generate(context, range=_range_with_budget(MAX_LOOP_ITEMS)):
                parts.append(part)
                length += len(part)
                if length > MAX_OUTPUT:
                    raise TemplateError(f"the chat template's output exceeds {MAX_OUTPUT} characters")
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(str(error.message or type(error).__name__)) from error
        except Exception as error:  # whatever the template's expressions raise on this conversation
            raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error
        return "".join(parts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML and sorts keys, which no model has seen in training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _range_with_budget(limit: int) -> Callable[..., range]:
    """A `range` for one rendering. The sandbox bounds each call, but not a loop inside a loop."""
    spent = 0

    def bounded_range(*bounds: int) -> range:
        nonlocal spent
        items = range(*bounds)
        spent += len(items)
        if spent > limit:
            raise TemplateError(f"the chat template loops over more than {limit} range() items")
        return items

    return bounded_range
