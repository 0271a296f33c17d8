"""Schemas that are rewritten for llguidance, compared with definitions that are slow and simple."""

import json
import random
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output import json_schema
from jaxserve.structured_output.grammar import check_grammar, make_matcher
from jaxserve.structured_output.json_schema import (
    FORMATS,
    MAX_PATTERN_WORK,
    MAX_VISITS,
    WORK_PER_PATTERN,
    prepared,
)
from jaxserve.structured_output.vocabulary import Vocabulary, tokens_in
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

INTEGER = {"type": "integer"}
NAMES = ("a", "b", "c")
NUM_DEFINITIONS = 4


@pytest.fixture(scope="module")
def vocabulary():
    tokenizer = tiny_tokenizer()
    return Vocabulary(tokenizer, tokenizer.vocab_size)


def random_schema(source: random.Random, depth: int) -> dict[str, Any]:
    """Returns a schema whose parts refer to the definitions of its root."""
    kind = source.choice(["ref", "ref", "integer", "object", "array", "anyOf", "allOf", "both"])
    if depth == 0 or kind == "integer":
        kind = source.choice(["ref", "ref", "integer"])

    def more() -> dict[str, Any]:
        return random_schema(source, depth - 1)

    match kind:
        case "ref":
            return {"$ref": f"#/$defs/{source.randrange(NUM_DEFINITIONS)}"}
        case "integer":
            return INTEGER
        case "object" | "both":
            names = source.sample(NAMES, source.randint(1, 3))
            required = [name for name in names if source.random() < 0.6]
            types = "object" if kind == "object" else ["object", "null"]
            properties = {name: more() for name in names}
            return {
                "type": types,
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": more(), "minItems": source.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [more() for _ in range(source.randint(1, 3))]}
        case _:
            return {"allOf": [more()]}


def random_root(seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    definitions = {str(i): random_schema(source, 2) for i in range(NUM_DEFINITIONS)}
    return {"$ref": "#/$defs/0", "$defs": definitions}


def has_value(schema: Any, root: dict[str, Any], num_references: int) -> bool:
    """Whether a value matches that follows at most so many references on each of its branches."""
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].split("/")[-1]]
        return num_references > 0 and has_value(target, root, num_references - 1)
    parts = schema.get("anyOf") or schema.get("allOf")
    if parts is not None:
        return any(has_value(part, root, num_references) for part in parts)
    if schema["type"] == "object":
        needed = [schema["properties"][name] for name in schema["required"]]
        return all(has_value(part, root, num_references) for part in needed)
    if schema["type"] == "array":
        return schema["minItems"] == 0 or has_value(schema["items"], root, num_references)
    return True


@pytest.mark.parametrize("seed", range(200))
def test_a_schema_is_false_exactly_if_no_finite_value_matches(seed):
    root = random_root(seed)
    # A smallest value follows each of the references at most once on a branch.
    assert (prepared(root) is not False) == has_value(root, root, NUM_DEFINITIONS + 1)


def test_both_outcomes_are_tested():
    outcomes = [prepared(random_root(seed)) is False for seed in range(200)]
    assert 20 < sum(outcomes) < 180


def matches(value: Any, schema: Any, root: dict[str, Any], seen: frozenset[str]) -> bool:
    """A validator for the schemas of `random_schema`. ``seen``: the references to this value."""
    if "$ref" in schema:
        reference = schema["$ref"]
        target = root["$defs"][reference.split("/")[-1]]
        return reference not in seen and matches(value, target, root, seen | {reference})
    parts = schema.get("anyOf") or schema.get("allOf")
    if parts is not None:
        return any(matches(value, part, root, seen) for part in parts)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return (
            "object" in schema["type"]
            and set(schema.get("required", ())) <= value.keys() <= properties.keys()
            and all(matches(v, properties[k], root, frozenset()) for k, v in value.items())
        )
    if isinstance(value, list):
        is_long_enough = len(value) >= schema.get("minItems", 0)
        is_array = schema["type"] == "array" and is_long_enough
        return is_array and all(matches(v, schema["items"], root, frozenset()) for v in value)
    if value is None:
        return "null" in schema["type"]
    return schema["type"] == "integer"


def random_text(vocabulary: Vocabulary, schema: dict[str, Any], seed: int) -> str | None:
    """Returns a random text; None if it has not ended after 300 tokens."""
    matcher = make_matcher(Grammar("json_schema", json.dumps(schema)), vocabulary)
    source, mask, text = random.Random(seed), np.zeros(vocabulary.num_words, np.uint32), b""
    for _ in range(300):
        vocabulary.fill(matcher, mask)
        assert not matcher.is_error(), matcher.get_error()
        token = int(source.choice(tokens_in(mask)))
        matcher.consume_token(token)
        text += b"" if token == vocabulary.eos_token_id else vocabulary.tokens[token]
        if matcher.is_stopped():
            return text.decode()
    return None


@pytest.mark.parametrize("seed", range(60))
def test_texts_match_the_original_schema(vocabulary, seed):
    root = random_root(seed)
    if prepared(root) is False:
        with pytest.raises(InvalidRequestError, match="no finite value"):
            check_grammar(Grammar("json_schema", json.dumps(root)), vocabulary)
        return
    texts = [random_text(vocabulary, root, seed) for seed in range(5)]
    for text in texts:
        assert text is None or matches(json.loads(text), root, root, frozenset())


def test_nothing_else_changes():
    schema = {
        "type": "object",
        "properties": {"$ref": INTEGER, "format": {"enum": ["x"]}, "items": False},
        "required": ["format"],
        "default": {"format": "x"},
        "examples": [{"$ref": "#/nowhere"}],
        "format": 5,
        "items": "malformed",
        "anyOf": "malformed",
    }
    assert prepared(schema) == schema
    assert prepared({"$ref": "#/$defs/none"}) == {"$ref": "#/$defs/none"}
    assert prepared({"$ref": "http://example.com/x"}) == {"$ref": "http://example.com/x"}


@pytest.mark.parametrize("pointer", ["#/$defs/a~1b", "#/$defs/a~1b/anyOf/0", "#/$defs/%C3%A9"])
def test_references_are_json_pointers(pointer):
    endless = {"type": "object", "properties": {"x": {"$ref": pointer}}, "required": ["x"]}
    definitions = {"a/b": {"anyOf": [endless]}, "é": endless}
    assert prepared({"$ref": pointer, "$defs": definitions}) is False


@pytest.mark.parametrize(
    ("schema", "is_matched"),
    [
        ({"type": "string", "enum": [1, None]}, False),
        ({"type": "string", "enum": [1, "x"]}, True),
        ({"type": "integer", "enum": [True, 1.5]}, False),
        ({"type": "integer", "enum": [2.0]}, True),
        ({"type": ["number", "null"], "const": 1}, True),
        ({"type": "object", "const": []}, False),
        ({"enum": []}, False),
        ({"const": None}, True),
        ({"type": "string", "enum": "malformed"}, True),
    ],
)
def test_values_of_other_types_are_no_values(schema, is_matched):
    assert prepared(schema) == (schema if is_matched else False)
    root = {"type": "object", "properties": {"a": schema, "b": INTEGER}, "required": ["b"]}
    assert prepared(root)["properties"]["a"] == (schema if is_matched else False)


def test_references_below_another_id_are_left_alone():
    inner = {"$id": "x", "type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    root = {"type": "object", "properties": {"y": inner}}
    assert prepared({"$ref": "#/$defs/a", "$defs": {"a": inner}}) is not False
    assert prepared(root) == root


def test_formats_that_are_enforced_compile(vocabulary):
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        assert prepared(schema) == schema
        check_grammar(Grammar("json_schema", json.dumps(schema)), vocabulary)
    assert prepared({"type": "string", "format": "password"}) == {"type": "string"}


def test_patterns_move_into_properties_only_if_they_allow_no_other_name():
    base = {"type": "object", "properties": {"a": INTEGER, "b": {}}, "additionalProperties": False}
    rule = {"minimum": 3}
    moved = prepared({**base, "patternProperties": {"^a$": rule, "^(a|b)$": {"maximum": 9}}})
    assert moved == {
        **base,
        "properties": {
            "a": {"allOf": [INTEGER, rule, {"maximum": 9}]},
            "b": {"allOf": [{}, {"maximum": 9}]},
        },
    }
    for other in ("a", "^a", "^(a|c)$", "^x-"):
        kept = {**base, "patternProperties": {other: rule}}
        assert prepared(kept) == kept
        both = prepared({**base, "patternProperties": {"^a$": rule, other: {}}})
        assert both["patternProperties"] == {other: {}}
        assert both["properties"] == {"a": {"allOf": [INTEGER, rule]}, "b": {}}
    for more in (True, {}, INTEGER):
        kept = {**base, "patternProperties": {"^a$": rule}, "additionalProperties": more}
        assert prepared(kept) == kept


def test_names_with_escapes_are_moved_too():
    name = 'é"\\'
    schema = {"type": "object", "properties": {name: INTEGER}, "additionalProperties": False}
    moved = prepared({**schema, "patternProperties": {'^é"\\\\$': {"minimum": 1}}})
    assert moved["properties"] == {name: {"allOf": [INTEGER, {"minimum": 1}]}}


def test_patterns_that_are_lists_of_names_agree_with_sets():
    source = random.Random(3)
    names = ["a", "b", "ab", "x-1", 'é"', "", "A"]
    num_moved = 0
    for _ in range(100):
        known = source.sample(names, source.randint(1, 4))
        lists = [source.sample(names, source.randint(1, 3)) for _ in range(source.randint(1, 3))]
        patterns = {f"^({'|'.join(each)})$": {"minimum": i} for i, each in enumerate(lists)}
        schema = {
            "type": "object",
            "properties": dict.fromkeys(known, INTEGER),
            "patternProperties": patterns,
            "additionalProperties": False,
        }
        found = prepared(schema)
        idle = [pattern for pattern in patterns if set(pattern[2:-2].split("|")) <= set(known)]
        num_moved += len(idle)
        assert set(found.get("patternProperties", {})) == patterns.keys() - set(idle)
        for name in known:
            more = [patterns[p] for p in idle if name in p[2:-2].split("|")]
            assert found["properties"][name] == ({"allOf": [INTEGER, *more]} if more else INTEGER)
    assert num_moved > 20


@pytest.mark.parametrize(("num_names", "num_patterns"), [(1, 500), (500, 1), (50, 50), (500, 500)])
def test_the_work_on_patterns_is_bounded(monkeypatch, num_names, num_patterns):
    """One request may have thousands of them, and it reaches the front before the engine."""
    work = []
    fitting, matcher = json_schema._fitting, json_schema._matcher
    monkeypatch.setattr(json_schema, "_matcher", lambda s: work.append(10) or matcher(s))
    monkeypatch.setattr(
        json_schema, "_fitting", lambda names, p: work.append(len(names)) or fitting(names, p)
    )
    one = {
        "type": "object",
        "properties": {f"a{i}": INTEGER for i in range(num_names)},
        "patternProperties": {f"^a{i}$": {"minimum": i} for i in range(num_patterns)},
        "additionalProperties": False,
    }
    schema = {"type": "object", "properties": {str(i): one for i in range(30)}}
    found = prepared(schema)
    assert sum(work) <= MAX_PATTERN_WORK
    assert found["properties"]["29"] == one
    is_moved = found["properties"]["0"] != one
    assert is_moved == (num_patterns * (WORK_PER_PATTERN + num_names) <= MAX_PATTERN_WORK)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, None), (2, 3), (3, 3)])
@pytest.mark.parametrize("required", [[], ["a"]])
def test_the_number_of_properties_is_enforced(vocabulary, least, most, required, closed):
    """llguidance can count names only if all of the known ones are required."""
    limits = {"minProperties": least} | ({} if most is None else {"maxProperties": most})
    rest = {"additionalProperties": False, "patternProperties": {"": {}}} if closed else {}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(required, INTEGER),
        "required": required,
        **limits,
        **rest,
    }
    for count in range(len(required), 6):
        text = json.dumps(dict.fromkeys("abcdef"[:count], 1))
        matcher = make_matcher(Grammar("json_schema", json.dumps(schema)), vocabulary)
        is_taken = matcher.consume_tokens(tokens_of(vocabulary, text)) and matcher.is_accepting()
        assert is_taken == (least <= count and (most is None or count <= most)), text
    optional = {**schema, "properties": {"a": INTEGER}, "required": []}
    with pytest.raises(InvalidRequestError, match="when all keys .* are required"):
        check_grammar(
            Grammar("json_schema", json.dumps(optional | {"minProperties": 1})), vocabulary
        )


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]


def test_the_search_is_bounded():
    count = 5000

    def chain(step: int) -> dict[str, Any]:
        links = {
            str(i): {
                "type": "object",
                "properties": {"x": {"$ref": f"#/$defs/{i + step}"}},
                "required": ["x"],
            }
            for i in range(1, count)
        }
        end = str(count if step > 0 else 0)
        first = "1" if step > 0 else str(count - 1)
        return {"$ref": f"#/$defs/{first}", "$defs": {**links, end: INTEGER}}

    assert count < MAX_VISITS
    assert prepared(chain(1)) is not False
    assert prepared(chain(-1)) is not False
