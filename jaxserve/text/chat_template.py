"""Renders chat templates: jinja programs that come with a model, so not to be trusted.

The language is the one that transformers gives them: the sandbox, loop controls, the helpers
``raise_exception``, ``strftime_now``, ``tojson``, and the ``generation`` tag, which marks text of
the assistant and changes nothing here. What a template may do is limited in text, in loop turns and
calls, and in time, which is looked at between its steps: a single step, such as padding a text to a
thousand million characters, has no limit. A template comes with the model, and never from a client.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxserve.errors import InvalidRequestError
from jaxserve.text import template_content

MAX_OUTPUT_CHARS = 16_000_000
"""Longest text that a template may make, as a whole or by repeating."""

MAX_LOOP_TURNS = 2_000_000
"""Turns of all loops of one rendering together, and calls."""

MAX_RENDER_TIME_S = 5.0
"""Processor time of one rendering."""

TURNS_PER_LOOK = 64
"""How often the time is looked at."""

MAX_POWER_BITS = 100_000
"""Size of the largest power of integers."""

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_TURNS = "_loop_turns"
_CONCAT = "_concat"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str],
    **variables: Any,
) -> str:
    """The prompt that messages become.

    Args:
      template: jinja source.
      messages: plain JSON values; those with ``content`` null or missing get an empty text. A
        template that goes over the parts of a content gets texts as lists of one part.
      add_generation_prompt: end with the beginning of the assistant's answer.
      tools: function descriptions, as plain JSON values.
      special_tokens: ``bos_token`` and so on; missing ones render as nothing.
      **variables: further variables, such as ``enable_thinking``. They override nothing.

    Raises:
      InvalidRequestError: the template refused the messages, in its own words, or failed.
    """
    try:
        compiled, wants_parts = _compile(template)
        chunks = compiled.generate(
            {
                **variables,
                **special_tokens,
                "messages": [_fill(message, wants_parts) for message in messages],
                "tools": None if tools is None else list(tools),
                "documents": variables.get("documents"),
                "add_generation_prompt": add_generation_prompt,
                _TURNS: _Turns(),
            }
        )
        return "".join(_limited(chunks))
    except jinja2.TemplateSyntaxError as error:
        raise _refusal(f"the chat template is not valid: line {error.lineno}: {error}") from error
    except _Refused as error:
        raise _refusal(str(error)) from error
    except Exception as error:  # a template is a program: it can fail in any way
        raise _refusal(f"the chat template failed: {type(error).__name__}: {error}") from error


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _fill(message: Mapping[str, Any], wants_parts: bool) -> dict[str, Any]:
    """A message as templates expect it.

    Nulls are left out, as templates would show them as the text "None". Reasoning has had several
    names; templates read the first, and those of gpt-oss the second.
    """
    filled = {key: value for key, value in message.items() if value is not None}
    content = filled.setdefault("content", "")
    if wants_parts and isinstance(content, str):
        filled["content"] = [{"type": "text", "text": content}]
    reasoning = next((filled[name] for name in REASONING_NAMES if name in filled), None)
    if reasoning is not None:
        filled = {"thinking": reasoning, **filled, "reasoning_content": reasoning}
    return filled


def _limited(chunks: Iterable[str]) -> Iterator[str]:
    length = 0
    for chunk in chunks:
        length += len(chunk)
        _check_length(length)
        yield chunk


def _check_length(length: int) -> None:
    if length > MAX_OUTPUT_CHARS:
        raise SecurityError(f"it made more than {MAX_OUTPUT_CHARS} characters")


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> tuple[jinja2.Template, bool]:
    """The program, and whether it wants the content of messages as parts."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters[_TURNS] = _count_turns
    environment.filters[_CONCAT] = _concat
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    wants_parts = template_content.wants_parts(environment.parse(template))
    return environment.from_string(template), wants_parts


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on what a template can make out of little."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
        return _Concats().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_length(len(sequence) * count)
        elif operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _check_length(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right
            if bits > MAX_POWER_BITS:
                raise SecurityError(f"a number has more than {MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    # Positional, as a template may name its own arguments as it likes.
    def call(__self, __context: Context, __called: Any, *args: Any, **named: Any) -> Any:
        """Calls a function, macro or method for a template."""
        __context.parent[_TURNS].take()
        return super().call(__context, __called, *args, **named)


class _Concats(NodeTransformer):
    """Makes a filter, which has a limit, of each ``~``."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
        return nodes.Filter(parts, _CONCAT, [], [], None, None, lineno=node.lineno)


def _concat(parts: list[Any]) -> str:
    texts = list(map(str, parts))
    _check_length(sum(map(len, texts)))
    return "".join(texts)


class _Turns:
    """Loop turns and time left in one rendering."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_TURNS
        self._end = time.thread_time() + MAX_RENDER_TIME_S

    def take(self) -> None:
        """Takes one of them. Raises SecurityError if there is none."""
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"it looped more than {MAX_LOOP_TURNS} times")
        if self._left % TURNS_PER_LOOK == 0 and time.thread_time() > self._end:
            raise SecurityError(f"it took more than {MAX_RENDER_TIME_S:g} s")


@jinja2.pass_context
def _count_turns(context: Context, items: Any) -> Any:
    """Wraps what a ``for`` goes over."""
    if isinstance(items, Undefined):
        return items  # empty, or an error: as the environment has it
    return _counted(items, context.parent[_TURNS])


def _counted(items: Iterable[Any], turns: _Turns) -> Iterator[Any]:
    for item in items:
        turns.take()
        yield item


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` renders what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        return caller()


class _Namespace(Namespace):
    """Variables that survive a loop, without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a variable can be called "self"
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it cannot set {name!r}, which begins with an underscore")


class _Refused(jinja2.TemplateError):
    """The template itself will not have the messages."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like the filter of jinja, but without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
