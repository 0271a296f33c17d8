"""Rewrites JSON schemas so that llguidance serves what they mean.

Parts that no finite value matches become ``false``: llguidance leaves out optional properties and
alternatives that are ``false``, and refuses a schema that needs one. Formats that llguidance does
not know are left out, because a format is an annotation unless a validator knows it. Patterns of
property names that allow no more names than ``properties`` move into ``properties``: llguidance
would allow a comma after the last property, and then nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""The formats that llguidance enforces."""

MAX_VISITS = 100_000
"""Maximum number of parts of a schema that are looked at, with repetitions, to find those that no
finite value matches. Schemas that need more are served as they are."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def prepared(schema: dict[str, Any]) -> Any:
    """Returns a schema for llguidance; False if no finite value matches.

    Args:
      schema: a JSON schema; it is not changed. Malformed parts stay as they are.

    Raises:
      RecursionError: it is nested too deeply.
    """
    return _rewrite(schema, _Finite(schema))


def _rewrite(schema: Any, finite: _Finite) -> Any:
    if not isinstance(schema, dict):
        return schema
    if not finite.matches(schema):
        return False
    new = dict(schema)
    for key in _MAPS:
        if isinstance(new.get(key), dict):
            new[key] = {name: _rewrite(part, finite) for name, part in new[key].items()}
    for key in _LISTS:
        if isinstance(new.get(key), list):
            new[key] = [_rewrite(part, finite) for part in new[key]]
    for key in _SINGLES:
        if isinstance(new.get(key), dict):
            new[key] = _rewrite(new[key], finite)
    kinds = finite.kinds(schema)
    if kinds < _kinds(schema):
        new["type"] = sorted(kinds)
    form = new.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del new["format"]
    return _without_idle_patterns(new)


class _Finite:
    """Finds the parts of a schema that no finite value matches.

    A reference matches a finite value if its target does. That is the least fixed point: targets
    start as not matched, and each pass over them uses the result of the last. Whatever is not
    understood counts as matched.

    Args:
      root: the schema that references start from.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._visits_left = MAX_VISITS
        self._matched: dict[str, bool] = dict.fromkeys(_references(root), False)
        targets = {reference: self._target(reference) for reference in self._matched}
        changed = bool(targets)
        while changed and self._visits_left > 0:
            changed = False
            for reference, target in reversed(targets.items()):
                if not self._matched[reference] and self.matches(target):
                    self._matched[reference] = changed = True

    def matches(self, schema: Any) -> bool:
        """Returns False if it is certain that no finite value matches a part of the root."""
        if not isinstance(schema, dict) or self._visits_left <= 0:
            return schema is not False or self._visits_left <= 0
        self._visits_left -= 1
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._matched.get(reference, True):
            return False
        if not all(map(self.matches, _items(schema.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            choices = _items(schema.get(key))
            if choices and not any(map(self.matches, choices)):
                return False
        return bool(self.kinds(schema))

    def kinds(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """Returns the types that a part of the root allows and that have finite values."""
        kinds = _kinds(schema)
        if "enum" in schema or "const" in schema:
            return kinds
        if "object" in kinds and not self._matches_object(schema):
            kinds -= {"object"}
        if "array" in kinds and not self._matches_array(schema):
            kinds -= {"array"}
        return kinds

    def _matches_object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        other = True if schema.get("patternProperties") else schema.get("additionalProperties")
        required = _items(schema.get("required"))
        return all(self.matches(known.get(n, other)) for n in required if isinstance(n, str))

    def _matches_array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems")
        items = schema.get("items")
        first = _items(schema.get("prefixItems")) or _items(items)
        rest = schema.get("additionalItems") if isinstance(items, list) else items
        if not isinstance(least, int | float) or least <= 0:
            return True
        return all(self.matches(part) for part in first[: int(min(least, len(first)))]) and (
            least <= len(first) or self.matches(rest)
        )

    def _target(self, reference: str) -> Any:
        """Returns the part that a reference points to; True if it is not in the root."""
        pointer = reference.removeprefix("#")
        part: Any = self._root
        if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
            return True
        for name in pointer.split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
                part = part[int(name)]
            elif isinstance(part, dict) and name in part:
                part = part[name]
            else:
                return True
            if isinstance(part, dict) and "$id" in part:
                return True  # references in it start from there
        return part


def _references(schema: Any) -> Iterator[str]:
    """Yields the references in a value, outermost first. Some may be data; those do no harm."""
    parts = schema.values() if isinstance(schema, dict) else _items(schema)
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for part in parts:
        yield from _references(part)


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types that a schema allows."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    names = frozenset(name for name in _items(given) if isinstance(name, str))
    return names or _SCALARS | {"object", "array"}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _without_idle_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Moves each pattern of ``patternProperties`` that matches no other name to ``properties``."""
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return schema
    if not properties or schema.get("additionalProperties") is not False:
        return schema
    idle = [pattern for pattern in patterns if _matches_only(tuple(properties), pattern)]
    if not idle:
        return schema
    moved = {}
    for name, part in properties.items():
        more = [patterns[pattern] for pattern in idle if _fits(name, pattern)]
        moved[name] = {"allOf": [part, *more]} if more else part
    rest = {pattern: part for pattern, part in patterns.items() if pattern not in idle}
    new = {**schema, "properties": moved, "patternProperties": rest}
    if not rest:
        del new["patternProperties"]
    return new


def _matches_only(names: tuple[str, ...], pattern: str) -> bool:
    """Returns whether a pattern matches no other names than these."""
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, {"const": 1}),
        "patternProperties": {pattern: {"const": 1}},
        "required": names,
        "additionalProperties": False,
    }
    # llguidance allows the comma in any case, and then a name that is not one of these.
    text = "".join(f"{json.dumps(name, ensure_ascii=False)}:1," for name in names)
    return _allowed_after(schema, "{" + text) == 0


def _fits(name: str, pattern: str) -> bool:
    """Returns whether a name matches the pattern of a schema."""
    text = json.dumps(name, ensure_ascii=False)
    return _allowed_after({"type": "string", "pattern": pattern}, text) is not None


def _allowed_after(schema: dict[str, Any], text: str) -> int | None:
    """Returns how many bytes may follow a text; None if the text itself is not allowed."""
    tokenizer = _bytes_tokenizer()
    source = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    matcher = LLMatcher(tokenizer, source, log_level=0)
    if not matcher.consume_tokens(list(text.encode())):
        return None
    mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    fill_next_token_bitmask(matcher, mask)
    return 0 if matcher.is_error() else int(np.bitwise_count(mask.view(np.uint32)).sum())


@functools.cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
