"""What the text of an answer must or must not be: grammars and bad words."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.decoding import json_type
from jaxserve.openai.protocol import GenerationRequest
from jaxserve.openai.tools import ToolUse
from jaxserve.parsing.enforced import call_schema
from jaxserve.sampling_params import MAX_BAD_WORDS, MAX_GRAMMAR_CHARS, Grammar, SamplingParams

MAX_BAD_WORD_CHARS = 1000
"""Longest bad word; `MAX_BAD_WORD_TOKENS` counts once it has been encoded."""

_FORMATS = "'text', 'json_object' or 'json_schema'"
_OPTIONS = frozenset(
    {"disable_any_whitespace", "disable_fallback", "disable_additional_properties"}
    | {"whitespace_pattern"}
)
"""Of structured_outputs, without effect: white space is always bounded."""


async def constrained(
    text_engine: TextEngine,
    request: GenerationRequest,
    params: SamplingParams,
    use: ToolUse | None = None,
) -> SamplingParams:
    """The parameters with the constraints that a request asks for.

    Raises:
      InvalidRequestError: a constraint is none, or there are several; ``param`` is the field.
    """
    if request.bad_words:
        params = msgspec.structs.replace(
            params, bad_words_token_ids=await _bad_words(text_engine, request.bad_words)
        )
    found = read_grammars(request)
    if len(found) > 1:
        raise InvalidRequestError(
            f"at most one of {', '.join(found)} can be given", param=next(iter(found))
        )
    if use is not None and use.is_enforced:
        # An answer that is calls has no text for a format to be of.
        found.pop("response_format", None)
        if found:
            field = next(iter(found))
            raise InvalidRequestError(
                f"{field} cannot be combined with a call that must be made; send tool_choice "
                "'auto' or 'none'",
                param=field,
            )
        found = {"tools": tools_grammar(use)}
    elif use is not None and use.choice == "auto" and found:
        await _check(text_engine, tools_grammar(use), "tools")
    for field, grammar in found.items():
        params = msgspec.structs.replace(params, grammar=grammar)
        await _check(text_engine, grammar, field)
    return params


async def _check(text_engine: TextEngine, grammar: Grammar, field: str) -> None:
    try:
        await text_engine.grammars.check(grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error.message}", param=field) from error


def read_grammars(request: GenerationRequest) -> dict[str, Grammar]:
    """The grammars in a request, by the field that they are in."""
    found = {}
    for field, read in _READERS.items():
        try:
            grammar = read(getattr(request, field), field)
        except InvalidRequestError as error:
            if error.param != "grammar":
                raise
            message = error.message.replace("grammar", field, 1)  # it is too long
            raise InvalidRequestError(message, param=field) from error
        if grammar is not None:
            found[field] = grammar
    return found


def tools_grammar(use: ToolUse) -> Grammar:
    """Calls and nothing else, as ``use`` wants them. Raises InvalidRequestError."""
    assert use.parameters is not None
    schema = json.dumps(call_schema(use.parameters, name=use.name, parallel=use.parallel))
    if len(schema) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"tools: to hold the model to them, their schemas must have at most "
            f"{MAX_GRAMMAR_CHARS} characters in all, got {len(schema)}",
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
    if kind == "json_object":
        return Grammar("json_object")
    if kind != "json_schema":
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
    return Grammar("json_schema", json.dumps(schema))


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
    return None if value is None else _of_kind(field.removeprefix("guided_"), value, field)


def _of_kind(kind: str, value: Any, field: str) -> Grammar:
    """A grammar in the words of vLLM."""
    match kind, value:
        case "json", dict():
            return Grammar("json_schema", json.dumps(value))
        case "json", str():
            return Grammar("json_schema", value)
        case "json_object", True:
            return Grammar("json_object")
        case "regex", str():
            return Grammar("regex", value)
        case "grammar", str():
            return Grammar("grammar", value)
        case "choice", [_, *_] if all(isinstance(text, str) for text in value):
            return Grammar("choice", json.dumps(value))
    name = field if field.startswith("guided_") else f"{field}.{kind}"
    raise InvalidRequestError(f"{name} must be {_EXPECTED[kind]}, got {value!r:.100}", param=field)


_EXPECTED = {
    "json": "a JSON schema, as an object or as a text",
    "json_object": "true",
    "regex": "a regular expression, as a text",
    "choice": "a list of at least one text",
    "grammar": "a grammar in Lark syntax or EBNF, as a text",
}
"""What the ways of vLLM to ask for structured output expect."""

_READERS = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _guided,
    "guided_regex": _guided,
    "guided_choice": _guided,
    "guided_grammar": _guided,
}


async def _bad_words(text_engine: TextEngine, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of words at the beginning of a text, and of words after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words: at most {MAX_BAD_WORDS} words, got {len(words)}", param="bad_words"
        )
    longest = max(map(len, words))
    if longest > MAX_BAD_WORD_CHARS:
        raise InvalidRequestError(
            f"bad_words must have at most {MAX_BAD_WORD_CHARS} characters each, got {longest}",
            param="bad_words",
        )
    if not all(word.strip() for word in words):
        raise InvalidRequestError("bad_words must not be empty", param="bad_words")
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    ids = await text_engine.encode_batch(
        forms, add_special_tokens=False, param="bad_words", any_length=True
    )
    return tuple(dict.fromkeys(tuple(word) for word in ids))
