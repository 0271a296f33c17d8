"""Values as JSON, Python literals and plain text, compared with json and ast."""

import ast
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.parsing.json_text import is_json
from jaxserve.parsing.python_literal import python_literal
from jaxserve.parsing.qwen3_coder import property_types, typed_json
from jaxserve.parsing.scanner import read_whole

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Python accepts more kinds of white space around values, so only strings contain them here.
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
JSON_LIKE = st.lists(
    st.sampled_from([*'{}[],:" \n-0129.eE+', '"a"', '"\\u00e9\\n"', "true", "null", "\\", "x"]),
    max_size=14,
).map("".join)
PYTHON_LIKE = st.lists(
    st.sampled_from([*"{}[],: -019.e'", "'a'", '"\\x41\\d"', "True", "None", "\\", "x", "\n"]),
    max_size=14,
).map("".join)


def accepts_json(text):
    def reject(constant):
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=reject)
    except ValueError:
        return False
    return True


@given(VALUES, st.sampled_from([None, 1]))
@settings(max_examples=60, deadline=None)
def test_is_json_accepts_the_output_of_json(value, indent):
    text = json.dumps(value, indent=indent)
    assert is_json(text)
    assert not is_json(text + ",")


@given(JSON_LIKE)
@settings(max_examples=200, deadline=None)
def test_is_json_agrees_with_json_loads(text):
    assert is_json(text) == accepts_json(text)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_reads_literals_as_python_writes_them(value):
    text = read_whole(repr(value), python_literal)
    assert text is not None
    assert json.loads(text) == value


@given(PYTHON_LIKE)
@settings(max_examples=200, deadline=None)
def test_python_literals_agree_with_ast(text):
    found = read_whole(text, python_literal)
    if not found or "\n" in text:  # Python rejects a line break within quotes
        return
    with warnings.catch_warnings(action="ignore"):  # invalid escapes
        assert json.loads(found) == ast.literal_eval(text.strip(" "))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'\n\t\\\'\x41\u00e9\U0001f525'", "\n\t\\'Aé🔥"),
        (r'"\ud83d\udd25 \d"', "🔥 \\d"),
        (r"'\ud800'", "\ufffd"),
        ("'a\nb'", "a\nb"),
        ("[true, false, null]", [True, False, None]),
        ("{'a': [], 'b': {},}", {"a": [], "b": {}}),
    ],
)
def test_reads_escapes_line_breaks_and_json_constants(text, value):
    found = read_whole(text, python_literal)
    assert found is not None
    assert json.loads(found) == value
    assert found.encode()


@pytest.mark.parametrize(
    "text",
    ["", "'", "'a", "'a' 'b'", "(1)", "{1}", "{1: 2}", "[,]", "[1 2]", "0x1", "1_000", "nan", "f()"]
    + [r"'\u12'", r"'\U99999999'", "--1", "007", "[" * 50, "1 2"],
)
def test_rejects_other_python(text):
    assert not read_whole(text, python_literal)


STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": ["array", "null"]},
        "sn": STRING_OR_NULL,
        "any": {},
        "e": {"enum": ["1", "2"]},
        "c": {"const": 1},
        "r": {"$ref": "#/$defs/Text"},
        "loop": {"$ref": "#/$defs/Loop"},
        "lost": {"$ref": "#/$defs/Lost/x"},
    },
    "$defs": {"Text": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "12", "12"),
        ("s", " a\n", " a\n"),
        ("s", '"a"', '"a"'),
        ("i", " 12 ", 12),
        ("i", "12.5", "12.5"),
        ("i", "007", "007"),
        ("i", "twelve", "twelve"),
        ("n", "12", 12),
        ("n", "-1.5e3", -1500.0),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "yes", "yes"),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("o", "{'a': True}", {"a": True}),
        ("o", "{'a': os}", "{'a': os}"),
        ("l", "[1]", [1]),
        ("l", "null", None),
        ("l", "{}", "{}"),
        ("sn", "null", None),
        ("sn", "5", "5"),
        ("any", "5", 5),
        ("any", '"5"', '"5"'),
        ("e", "1", "1"),
        ("c", "1", 1),
        ("r", "5", "5"),
        ("loop", "5", 5),
        ("lost", "5", 5),
        ("unknown", "[5]", [5]),
        ("unknown", "hello", "hello"),
    ],
)
def test_values_get_the_type_that_the_schema_allows(key, text, value):
    assert json.loads(typed_json(text, SCHEMA, key)) == value
    assert type(json.loads(typed_json(text, SCHEMA, key))) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"k": True}},
        {"properties": {"k": {"type": 5, "anyOf": 5, "enum": 5, "$ref": 5}}},
        {"properties": {"k": {"anyOf": [True, {"type": "string"}]}}},
        {"properties": {"k": {"$ref": "elsewhere.json"}}},
    ],
)
def test_odd_schemas_allow_any_type(schema):
    assert typed_json("5", schema, "k") == "5"


def test_references_are_followed_once_each():
    """Alternatives of alternatives would be followed more often than a schema has characters."""
    for last in ({"anyOf": [{"$ref": "#/$defs/a"}]}, {"type": "integer"}):
        following = {"a": "b", "b": "c", "c": "d"}
        links = {a: {"anyOf": [{"$ref": f"#/$defs/{b}"}] * 500} for a, b in following.items()}
        schema = {"properties": {"k": {"$ref": "#/$defs/a"}}, "$defs": {**links, "d": last}}
        assert typed_json("5", schema, "k") == "5"
    assert property_types(schema, "k") == {"integer"}


@given(st.text(), st.sampled_from(sorted(SCHEMA["properties"])))
@settings(max_examples=100, deadline=None)
def test_any_text_becomes_json(text, key):
    value = json.loads(typed_json(text, SCHEMA, key))
    assert value == text or accepts_json(text) or value == read_python(text)


def read_python(text):
    with warnings.catch_warnings(action="ignore"):
        return ast.literal_eval(text.strip())
