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
import re
from collections.abc import Iterable, Iterator, Mapping
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

MAX_PATTERN_WORK = 1000
"""Maximum work on the patterns of property names of a schema: `WORK_PER_PATTERN` for each, and 1
for each name that it is compared with. The patterns of objects that need more stay where they are.
"""

WORK_PER_PATTERN = 20
"""Compiling a pattern takes as long as comparing it with this many names, or longer."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_KINDS: Mapping[type, frozenset[str]] = {
    **{bool: frozenset({"boolean"}), int: frozenset({"integer", "number"})},
    **{str: frozenset({"string"}), type(None): frozenset({"null"})},
    **{list: frozenset({"array"}), dict: frozenset({"object"})},
}


def prepared(schema: dict[str, Any]) -> Any:
    """Returns a schema for llguidance; False if no finite value matches.

    Args:
      schema: a JSON schema; it is not changed. Malformed parts stay as they are.

    Raises:
      RecursionError: it is nested too deeply.
    """
    return _rewrite(schema, _Finite(schema), _Patterns())


def _rewrite(schema: Any, finite: _Finite, patterns: _Patterns) -> Any:
    if not isinstance(schema, dict):
        return schema
    if not finite.matches(schema):
        return False
    new = dict(schema)
    for key in _MAPS:
        if isinstance(new.get(key), dict):
            new[key] = {name: _rewrite(part, finite, patterns) for name, part in new[key].items()}
    for key in _LISTS:
        if isinstance(new.get(key), list):
            new[key] = [_rewrite(part, finite, patterns) for part in new[key]]
    for key in _SINGLES:
        if isinstance(new.get(key), dict):
            new[key] = _rewrite(new[key], finite, patterns)
    kinds = finite.kinds(schema)
    if kinds < _kinds(schema):
        new["type"] = sorted(kinds)
    form = new.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del new["format"]
    return patterns.without_idle(new)


class _Finite:
    """Finds the parts of a schema that no finite value matches.

    A reference matches a finite value if its target does. That is the least fixed point: targets
    start as not matched, and each pass over them uses the result of the last. Whatever is not
    understood counts as matched.

    Args:
      root: the schema that references start from.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._visits_left = MAX_VISITS
        self._matched: dict[str, bool] = dict.fromkeys(_references(root), False)
        targets = {reference: target_of(reference, root) for reference in self._matched}
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
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            is_matched = not isinstance(values, list) or any(_kinds_of(v) & kinds for v in values)
            return kinds if is_matched else frozenset()
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


def target_of(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the part that a reference, such as #/$defs/name, points to; None if there is none.

    That is so too for a part below another ``$id``, whose own references do not start at the root.
    """
    pointer = reference.removeprefix("#")
    part: Any = root
    if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
        return None
    for name in pointer.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and re.fullmatch(r"\d{1,9}", name) and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, Mapping) and name in part:
            part = part[name]
        else:
            return None
        if isinstance(part, Mapping) and "$id" in part:
            return None
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


def _kinds_of(value: Any) -> frozenset[str]:
    """Returns the types that a value has."""
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return _KINDS.get(type(value), frozenset())


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _Patterns:
    """Moves the patterns of property names that match no other name than the known ones.

    llguidance compiles each pattern, so the work for all of a schema is limited.
    """

    def __init__(self) -> None:
        self._work_left = MAX_PATTERN_WORK

    def without_idle(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a schema whose ``properties`` have the parts of such patterns."""
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        if not isinstance(properties, dict) or not isinstance(patterns, dict):
            return schema
        if not properties or schema.get("additionalProperties") is not False:
            return schema
        work = len(patterns) * (WORK_PER_PATTERN + len(properties))
        if work > self._work_left:
            return schema
        self._work_left -= work
        fitting = {pattern: _fitting(properties, pattern) for pattern in patterns}
        # Any name will do for a pattern that fits none.
        idle = [p for p in patterns if _matches_only(fitting[p] or list(properties)[:1], p)]
        if not idle:
            return schema
        more: dict[str, list[Any]] = {}
        for pattern in idle:
            for name in fitting[pattern]:
                more.setdefault(name, []).append(patterns[pattern])
        moved = {
            n: {"allOf": [part, *more[n]]} if n in more else part for n, part in properties.items()
        }
        rest = {pattern: part for pattern, part in patterns.items() if pattern not in idle}
        new = {**schema, "properties": moved, "patternProperties": rest}
        if not rest:
            del new["patternProperties"]
        return new


def _fitting(names: Iterable[str], pattern: str) -> list[str]:
    """Returns the names that match the pattern of a schema."""
    matcher = _matcher({"type": "string", "pattern": pattern})
    texts = {name: list(_quoted(name).encode()) for name in names}
    return [name for name, text in texts.items() if matcher.validate_tokens(text) == len(text)]


def _matches_only(names: list[str], pattern: str) -> bool:
    """Returns whether a pattern matches no other names than these."""
    matcher = _matcher(
        {
            "type": "object",
            "properties": dict.fromkeys(names, {"const": 1}),
            "patternProperties": {pattern: {"const": 1}},
            "required": names,
            "additionalProperties": False,
        }
    )
    # llguidance allows the comma in any case, and then a name that is not one of these.
    text = "{" + "".join(f"{_quoted(name)}:1," for name in names)
    if not matcher.consume_tokens(list(text.encode())):
        return False
    mask = np.zeros((1, -(-_bytes_tokenizer().vocab_size // 32)), np.int32)
    fill_next_token_bitmask(matcher, mask)
    return matcher.get_error().startswith("NoExtensionBias")  # nothing can follow


def _matcher(schema: dict[str, Any]) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return LLMatcher(_bytes_tokenizer(), source, log_level=0)


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


@functools.cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
