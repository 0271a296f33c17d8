"""Renders chat templates: untrusted jinja programs that come with a model, never from a client.

Templates have the features of transformers: the sandbox, loop controls, the helpers
``raise_exception``, ``strftime_now`` and ``tojson``, and the ``generation`` tag, which marks text
of the assistant and has no effect here. The output, the loop iterations and calls, and the
processor time are limited. The time is checked between operations, so a single operation, such as
padding a string to a billion characters, has no limit.
"""

from __future__ import annotations

import functools
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
from jaxserve.text.json_size import dumps

MAX_OUTPUT_CHARS = 16_000_000
"""Maximum length of the rendered prompt, and of each string or list that a template makes."""

MAX_LOOP_TURNS = 2_000_000
"""Maximum number of loop iterations and calls in one rendering."""

MAX_RENDER_TIME_S = 5.0
"""Maximum processor time of one rendering."""

TURNS_PER_TIME_CHECK = 64
"""Loop iterations and calls between two checks of the time."""

MAX_POWER_BITS = 100_000
"""Maximum number of bits of a power of integers."""

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""The keys of a message that may hold its reasoning; the first one that is set counts."""

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
    """Returns the prompt for a list of messages.

    Args:
      template: jinja source.
      messages: plain JSON values. A ``content`` that is null or missing becomes "". If the template
        loops over the parts of a content, a string becomes a list of one part.
      add_generation_prompt: end the prompt with the beginning of the assistant's message.
      tools: function definitions, as plain JSON values.
      special_tokens: ``bos_token`` and so on; missing ones render as nothing.
      **variables: further variables, such as ``enable_thinking``. They never override the others.

    Raises:
      InvalidRequestError: the template rejected the messages, in its own words, or it failed.
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
    except Exception as error:  # a template is a program and can fail in any way
        raise _refusal(f"the chat template failed: {error}") from error


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _fill(message: Mapping[str, Any], wants_parts: bool) -> dict[str, Any]:
    """Returns a message in the form that templates expect.

    Nulls are left out, because templates would render them as "None". Reasoning gets two names:
    most templates read the first of `REASONING_NAMES`, those of gpt-oss read the second.
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
    """Yields the chunks. Raises SecurityError once they are too long in total."""
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
    """Returns the compiled template, and whether it needs the content of messages in parts."""
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
    wants_parts = _wants_parts(environment.parse(template))
    return environment.from_string(template), wants_parts


@functools.lru_cache(maxsize=16)
def shows_tools(template: str) -> bool:
    """Returns True if a template reads the variable ``tools``, or is not valid."""
    try:
        tree = _Environment(extensions=[_GenerationTag, loopcontrols]).parse(template)
    except jinja2.TemplateSyntaxError:
        return True  # rendering it reports the error
    return any(name.name == "tools" for name in tree.find_all(nodes.Name))


def _wants_parts(template: nodes.Template) -> bool:
    """Returns True if a template loops over the content of messages and cannot render a string.

    A template that tests whether the content is a string can render one.
    """
    if any(test.name == "string" for test in template.find_all(nodes.Test)):
        return False
    names = {
        assigned.target.name
        for assigned in template.find_all(nodes.Assign)
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node)
    }
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(value: nodes.Node | None, names: set[str] | frozenset[str] = frozenset()) -> bool:
    """Returns True for ``x.content``, ``x['content']``, or a variable that is in ``names``."""
    while isinstance(value, nodes.Filter):
        value = value.node
    if isinstance(value, nodes.Getattr):
        return value.attr == "content"
    if isinstance(value, nodes.Getitem):
        return isinstance(value.arg, nodes.Const) and value.arg.value == "content"
    return isinstance(value, nodes.Name) and value.name in names


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on operations that make large values out of small ones."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template, and adds filters that count loop iterations and limit ``~``."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
        return _Concats().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator unless the result would be too large. Raises SecurityError."""
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

    # These parameters must not have the names of keyword arguments that a template may pass.
    def call(__self, __context: Context, __called: Any, *args: Any, **named: Any) -> Any:
        """Calls a function, macro or method of a template, and counts the call."""
        __context.parent[_TURNS].take()
        return super().call(__context, __called, *args, **named)


class _Concats(NodeTransformer):
    """Replaces each ``~``, which joins strings, by a filter that limits the result."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
        return nodes.Filter(parts, _CONCAT, [], [], None, None, lineno=node.lineno)


def _concat(parts: list[Any]) -> str:
    texts = list(map(str, parts))
    _check_length(sum(map(len, texts)))
    return "".join(texts)


class _Turns:
    """The loop iterations, calls and time that one rendering has left."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_TURNS
        self._end = time.thread_time() + MAX_RENDER_TIME_S

    def take(self) -> None:
        """Uses up one iteration or call. Raises SecurityError if none is left, or no time."""
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"it looped more than {MAX_LOOP_TURNS} times")
        if self._left % TURNS_PER_TIME_CHECK == 0 and time.thread_time() > self._end:
            raise SecurityError(f"it took more than {MAX_RENDER_TIME_S:g} s")


@jinja2.pass_context
def _count_turns(context: Context, items: Any) -> Any:
    """Returns the values of a ``for``, and counts them as the loop takes them."""
    if isinstance(items, Undefined):
        return items  # the environment decides whether this is empty or an error
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
    """Variables that outlive a loop. No name may reach Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # allows a variable named "self"
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
    """The template called ``raise_exception``."""


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
    """Converts to JSON as jinja's filter does, but without escapes for HTML."""
    return dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
