"""Structural tags: grammars of whole completions, with think blocks and tool calls.

The grammar of a request constrains the content: to a JSON schema, a regular expression and so on. A
model may also think before the content, or call tools instead of writing it. A structural tag is a
grammar that leaves room for both, in the Lark syntax of llguidance. In it, ``@content`` stands for
the grammar of the content:

    start: think (@content | calls)
    think: ...
    calls: ...

The rules ``think`` and ``calls`` depend on the format of the model; each format of `parsing` writes
its own, with a `RuleWriter`. A completion that must be nothing but calls (``tool_choice:
"required"`` or a named function) is plain JSON in every format: `forced_calls_schema`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.structured_output.grammar import WHITESPACE
from jaxserve.structured_output.json_schema import prepared, target_of
from jaxserve.text.tokenizer import Tokenizer

TagTerm = Callable[[str], str]
"""Returns the Lark term for a tag of a format such as ``<tool_call>``: see `tag_terms`."""

MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of the schema of a tool, whose references are rewritten recursively."""

MAX_VALUE_CHARS = 2**20
"""Maximum length of the schemas of single arguments in the rule ``calls``, all together. Each has
its own copy of what it refers to, so they can be far longer than the schemas of the tools."""


def structural_tag(*, think: str, calls: str) -> str:
    """Returns the grammar of a completion that may think first, and call tools instead.

    Args:
      think: the rule ``think`` and the rules that it needs; empty: the model does not think.
      calls: the rule ``calls`` and the rules that it needs; empty: no tool can be called.

    Returns:
      A grammar in the Lark syntax of llguidance, or "" if the completion is the content alone.
    """
    if not think and not calls:
        return ""
    content = "(@content | calls)" if calls else "@content"
    return f"start: {'think ' if think else ''}{content}\n{think}{calls}"


def tag_terms(tokenizer: Tokenizer) -> TagTerm:
    """Returns a function that writes a tag as a Lark term, for a special token or for text."""
    special: Mapping[str, int] = {tokenizer.token_text(i): i for i in tokenizer.special_ids}

    def term(tag: str) -> str:
        return f"<[{special[tag]}]>" if tag in special else quoted(tag)

    return term


def quoted(text: str) -> str:
    """Returns the Lark term that matches a string."""
    return json.dumps(text, ensure_ascii=False)


class RuleWriter:
    """Writes parts of the rule ``calls`` for a format.

    Args:
      tools: function names -> JSON schemas of their parameters.
      parallel: allow more than one call.
      tag: writes the tags of the format.

    Attributes:
      tools: as given.
      tag: as given.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool, tag: TagTerm
    ) -> None:
        self.tools = tools
        self.tag = tag
        self._parallel = parallel
        self._value_chars = 0

    def json_call(self, arguments: str) -> str:
        """Returns the term for a call of any tool as ``{"name": ..., arguments: {...}}``.

        Raises:
          InvalidRequestError: a schema is nested too deeply, or no finite call matches.
        """
        return _json_term(self._any_call(arguments))

    @functools.cached_property
    def arguments(self) -> dict[str, Mapping[str, Any]]:
        """Function names -> JSON schemas of their arguments, for `json_value`.

        Tools and optional arguments that no finite value matches are left out, or are False.

        Raises:
          InvalidRequestError: a schema is nested too deeply, or no finite call matches.
        """
        found = {}
        for tool, call in zip(self.tools, self._root["anyOf"], strict=True):
            schema = call and call["properties"]["arguments"]
            if isinstance(schema, Mapping) and "$ref" in schema:
                schema = target_of(schema["$ref"], self._root)
            if isinstance(schema, Mapping):
                found[tool] = schema
        return found

    def json_value(self, schema: Any) -> str:
        """Returns the term for JSON that matches a part of a schema in `arguments`; True: any JSON.

        Raises:
          InvalidRequestError: all such terms together are too long.
        """
        own = _on_its_own(schema, self._root) if isinstance(schema, Mapping) else {}
        term = _json_term(own)
        self._value_chars += len(term)
        if self._value_chars > MAX_VALUE_CHARS:
            raise InvalidRequestError(
                "tools: to constrain the model to them, the schemas of their arguments, each with "
                f"a copy of what it refers to, must have at most {MAX_VALUE_CHARS} characters in "
                "total",
                param="tools",
            )
        return term

    @functools.cached_property
    def _root(self) -> dict[str, Any]:
        return self._any_call("arguments")

    def _any_call(self, arguments: str) -> dict[str, Any]:
        ready = prepared(any_call_schema(self.tools, arguments=arguments))
        if not isinstance(ready, dict):
            raise InvalidRequestError(
                "tools: no finite value matches the parameters of any of them", param="tools"
            )
        return ready

    def calls(self, call: str, *, between: str = "", before: str = "", after: str = "") -> str:
        """Returns the rule ``calls``: one call, or one or more if parallel calls are allowed.

        Args:
          call: the right-hand side of the rule for one call.
          between: terms between two calls.
          before: terms before the first call.
          after: terms after the last call.
        """
        more = f"({between} call)*" if self._parallel else ""
        return f"calls: {before} call {more} {after}\ncall: {call}\n"


def forced_calls_schema(
    tools: Mapping[str, Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
) -> dict[str, Any]:
    """Returns the JSON schema of a completion that consists of tool calls.

    Args:
      tools: function names -> JSON schemas of their parameters; an empty schema allows any object.
      name: the function that must be called; the completion is its arguments, for
        `parsing.forced_calls.named_call`. None: the completion is a list of one or more calls,
        ``[{"name": ..., "parameters": {...}}]``, for `parsing.forced_calls.json_array_calls`.
      parallel: allow more than one call.

    Raises:
      InvalidRequestError: a schema is nested too deeply.
    """
    assert tools
    if name is not None:
        return _object_schema(tools[name])
    call = any_call_schema(tools, arguments="parameters")
    definitions = {"$defs": call.pop("$defs")} if "$defs" in call else {}
    limit = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": call, **limit, **definitions}


def any_call_schema(tools: Mapping[str, Mapping[str, Any]], *, arguments: str) -> dict[str, Any]:
    """Returns the JSON schema of one call of any tool, ``{"name": ..., arguments: {...}}``.

    Raises:
      InvalidRequestError: a schema is nested too deeply.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool, parameters in tools.items():
        schema = _object_schema(parameters)
        pointer = "#/$defs/" + tool.replace("~", "~0").replace("/", "~1")
        moved = _with_root_at(schema, pointer, MAX_SCHEMA_DEPTH)
        if moved != schema:
            definitions[tool] = moved
            schema = {"$ref": pointer}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [tool]}, arguments: schema},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}


def _json_term(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _on_its_own(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of a schema with copies of all that it refers to, directly or not."""
    names: dict[str, str] = {}  # the references, in order, and the names of the copies

    def copied(part: Any) -> Any:
        if isinstance(part, list):
            return [copied(each) for each in part]
        if not isinstance(part, Mapping):
            return part
        new = {key: copied(value) for key, value in part.items()}
        reference = part.get("$ref")
        if isinstance(reference, str) and target_of(reference, root) is not None:
            new["$ref"] = "#/$defs/" + names.setdefault(reference, str(len(names)))
        return new

    new = copied(_without_definitions(schema))
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        for reference in [*names][len(definitions) :]:
            target = _without_definitions(target_of(reference, root))
            definitions[names[reference]] = copied(target)
    return {**new, "$defs": definitions} if definitions else new


def _without_definitions(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {key: part for key, part in schema.items() if key not in ("$defs", "definitions")}


def _object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the type of a schema of arguments, which are always an object, if it is missing."""
    return {"type": "object", **parameters}


def _with_root_at(schema: Any, pointer: str, depth: int) -> Any:
    """Returns a schema whose references to its own root point to its new place, ``pointer``."""
    if depth == 0:
        raise InvalidRequestError(
            f"tools: a schema is nested deeper than {MAX_SCHEMA_DEPTH} levels", param="tools"
        )
    if isinstance(schema, list):
        return [_with_root_at(part, pointer, depth - 1) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _with_root_at(part, pointer, depth - 1) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = pointer + reference[1:]
    return moved
