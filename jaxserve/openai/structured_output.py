"""Reads the grammar of a request: from response_format or a similar field, or from forced calls."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.decoding import json_type
from jaxserve.openai.protocol import GenerationRequest
from jaxserve.openai.tools import PROMPT_TAIL, ToolUse
from jaxserve.parsing.registry import call_rules, think_rules
from jaxserve.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from jaxserve.structured_output.structural_tag import (
    RuleWriter,
    forced_calls_schema,
    structural_tag,
    tag_terms,
)
from jaxserve.text.json_size import dumps

_FORMATS = "'text', 'json_object' or 'json_schema'"
_OPTIONS = frozenset(
    {"disable_any_whitespace", "disable_fallback", "disable_additional_properties"}
    | {"whitespace_pattern"}
)
"""Options of structured_outputs that have no effect: white space is always bounded."""


async def read_grammar(
    text_engine: TextEngine, request: GenerationRequest, use: ToolUse | None = None, *, size: int
) -> Grammar | None:
    """Reads and checks the grammar that the text must match; None: the text is free.

    ``size`` is that of the request (`size_of`).

    Raises:
      InvalidRequestError: a grammar is invalid, or there are several; ``param`` is the field.
      QueueFullError: too many grammars wait for their check.
    """
    to_check, grammar = await text_engine.build(lambda: _grammars(request, use), size=size)
    for field, each in to_check.items():
        await _check(text_engine, each, field)
    return grammar


def _grammars(
    request: GenerationRequest, use: ToolUse | None
) -> tuple[dict[str, Grammar], Grammar | None]:
    """Returns the grammars to check, by field, and the one that the text must match, or None."""
    found = read_grammars(request)
    if len(found) > 1:
        raise InvalidRequestError(
            f"at most one of {', '.join(found)} can be given", param=next(iter(found))
        )
    if use is not None and use.is_enforced:
        # A forced tool call produces no text, so response_format does not apply.
        found.pop("response_format", None)
        if found:
            field = next(iter(found))
            raise InvalidRequestError(
                f"{field} cannot be combined with a forced tool call; send tool_choice 'auto' or "
                "'none'",
                param=field,
            )
        found = {"tools": tools_grammar(use)}
    elif use is not None and use.choice == "auto" and found:
        # The structural tag will contain the schemas of the tools.
        return {"tools": tools_grammar(use), **found}, next(iter(found.values()))
    return found, next(iter(found.values()), None)


def with_structural_tag(
    grammar: Grammar | None, model: ServedModel, use: ToolUse, prompt: str
) -> Grammar | None:
    """Returns the grammar with room for a think block before the text and for calls instead of it.

    Args:
      grammar: what the text must match; None: anything, and None is returned.
      model: the model that writes the text.
      use: the tools that may be called.
      prompt: the rendered prompt; it may have opened a think block.

    Raises:
      InvalidRequestError: tools may be called, and no grammar is known for the format in which
        this model writes calls.
    """
    if grammar is None:
        return None
    tag = tag_terms(model.tokenizer)
    think = calls = ""
    if model.reasoning_parser is not None:
        think = think_rules(model.reasoning_parser, tag, prompt=prompt[-PROMPT_TAIL:])
    if use.choice == "auto":
        assert model.tool_call_parser is not None
        assert use.parameters is not None
        rules = RuleWriter(use.parameters, parallel=use.parallel, tag=tag)
        written = call_rules(model.tool_call_parser, rules)
        if written is None:
            raise InvalidRequestError(
                f"a completion cannot have both a grammar and tool calls in the format "
                f"{model.tool_call_parser}; send tool_choice 'none' or no grammar",
                param="tools",
            )
        calls = written
    return msgspec.structs.replace(grammar, structural_tag=structural_tag(think=think, calls=calls))


async def _check(text_engine: TextEngine, grammar: Grammar, field: str) -> None:
    """Raises InvalidRequestError, which names the field, unless the grammar can be followed."""
    try:
        await text_engine.grammars.check(grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error.message}", param=field) from error


def read_grammars(request: GenerationRequest) -> dict[str, Grammar]:
    """Returns the grammars of a request, by field. Raises InvalidRequestError."""
    found = {}
    for field, read in _READERS.items():
        try:
            grammar = read(getattr(request, field), field)
        except InvalidRequestError as error:
            if error.param != "grammar":
                raise
            message = error.message.replace("grammar", field, 1)  # the grammar is too long
            raise InvalidRequestError(message, param=field) from error
        if grammar is not None:
            found[field] = grammar
    return found


def tools_grammar(use: ToolUse) -> Grammar:
    """Returns the grammar of a completion that is only tool calls. Raises InvalidRequestError."""
    assert use.parameters is not None
    schema = dumps(forced_calls_schema(use.parameters, name=use.name, parallel=use.parallel))
    if len(schema) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"tools: to constrain the model to them, their schemas must have at most "
            f"{MAX_GRAMMAR_CHARS} characters in total, got {len(schema)}",
            param="tools",
        )
    return Grammar("json_schema", schema)


def _response_format(value: Any, field: str) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{field} must be an object with the type {_FORMATS}, got {value!r:.100}", param=field
        )
    kind = value.get("type")
    if kind == "text":
        return None
    own = value.get("schema")  # where llama.cpp and others have it
    if own is not None and (kind == "json_object" or value.get("json_schema") is None):
        value = {"json_schema": {"schema": own}}
    elif kind == "json_object":
        return Grammar("json_object")
    if kind not in ("json_object", "json_schema"):
        raise InvalidRequestError(
            f"{field}.type must be {_FORMATS}, got {kind!r:.100}", param=field
        )
    outer = value.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"{field}.json_schema.schema must be a JSON schema as an object, got {schema!r:.100}",
            param=field,
        )
    return Grammar("json_schema", dumps(schema))


def _structured_outputs(value: Any, field: str) -> Grammar | None:
    if value is None:
        return None
    names = ", ".join(_EXPECTED)
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{field} must be an object with one of {names}, got {json_type(value)}", param=field
        )
    asked = {k: v for k, v in value.items() if v is not None and v is not False}
    kinds = [key for key in asked if key not in _OPTIONS]
    if len(kinds) != 1 or kinds[0] not in _EXPECTED:
        raise InvalidRequestError(
            f"{field} must have exactly one of {names}, got {', '.join(kinds)[:100] or 'none'}",
            param=field,
        )
    return _of_kind(kinds[0], asked[kinds[0]], field)


def _guided(value: Any, field: str) -> Grammar | None:
    # An empty grammar is the default of llama.cpp.
    is_set = value is not None and not (field == "grammar" and value == "")
    return _of_kind(_FIELDS[field], value, field) if is_set else None


def _of_kind(kind: str, value: Any, field: str) -> Grammar:
    """Returns the grammar in a value of one of vLLM's kinds. Raises InvalidRequestError."""
    match kind, value:
        case "json", dict():
            return Grammar("json_schema", dumps(value))
        case "json", str():
            return Grammar("json_schema", value)
        case "json_object", True:
            return Grammar("json_object")
        case "regex", str():
            return Grammar("regex", value)
        case "grammar", str():
            return Grammar("grammar", value)
        case "choice", [_, *_] if all(isinstance(text, str) for text in value):
            return Grammar("choice", dumps(value))
    name = field if field in _FIELDS else f"{field}.{kind}"
    raise InvalidRequestError(f"{name} must be {_EXPECTED[kind]}, got {value!r:.100}", param=field)


_FIELDS = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    **{"json_schema": "json", "grammar": "grammar", "ebnf": "grammar", "regex": "regex"},
}
"""The fields that hold a grammar alone, with its kind: those of vLLM, llama.cpp and SGLang."""

_EXPECTED = {
    "json": "a JSON schema, as an object or as a string",
    "json_object": "true",
    "regex": "a regular expression, as a string",
    "choice": "a list of at least one string",
    "grammar": "a grammar in Lark syntax or EBNF, as a string",
}
"""The value that each of vLLM's kinds expects, for error messages."""

_READERS = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **dict.fromkeys(_FIELDS, _guided),
}
