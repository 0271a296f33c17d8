"""Grammars that the check accepts, and the messages for grammars that it rejects.

test_constraint.py tests how completions follow a grammar.
"""

import json

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from jaxserve.structured_output.grammar import MAX_CHOICES, MAX_MESSAGE_CHARS, check_grammar
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def vocabulary():
    tokenizer = tiny_tokenizer()
    return Vocabulary(tokenizer, tokenizer.vocab_size)


NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar("json_schema", json.dumps({"$ref": "#/$defs/node", "$defs": {"node": NODE}})),
        Grammar("json_schema", '{"enum": ["é", "\\ud83d\\udd25", "a\\"b", "\\u2028"]}'),
        Grammar("regex", r"a/b|\d{3}-[^x\n]+"),
        Grammar("regex", r"((a{0,100}){0,100}){0,100}"),
        Grammar("choice", json.dumps([f"choice {i}" for i in range(MAX_CHOICES)])),
        Grammar("choice", '["yes", "no/\\n\\"é🔥"]'),
        Grammar("grammar", 'start: "a" NAME\nNAME: /[a-z]+/'),
        Grammar("grammar", 'root ::= "a" | "b" [0-9]+'),
        Grammar("grammar", 'start: <|im_end|> "a"'),
    ],
)
def test_accepts_valid_grammars(vocabulary, grammar):
    check_grammar(grammar, vocabulary)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", '{"type": "not-a-type"}'), "JSON schema.*not-a-type"),
        (Grammar("json_schema", '{"$ref": "#/$defs/nope"}'), "nope"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "does not fetch"),
        (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "does not fetch"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("json_schema", '{"type": "string", "pattern": "("}'), "unclosed group"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'), "minimum"),
        (Grammar("json_schema", '{"not": {}}'), "not"),
        *[(Grammar("json_schema", text), "a JSON object") for text in ("true", "[]", '"x"', "5")],
        (Grammar("json_schema", '{"a"'), "JSON schema"),
        (Grammar("json_schema", ""), "JSON schema"),
        (Grammar("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "JSON schema"),
        (Grammar("regex", "(a"), "regex cannot be used.*unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", "(" * 5000 + "a" + ")" * 5000), "regex"),
        (Grammar("regex", r"[^\s\S]"), "no text matches"),
        (Grammar("regex", r"(\w|\w\w)*" * 300), "regex cannot be used: it is too much work"),
        (Grammar("choice", "[]"), f"1 to {MAX_CHOICES} strings, got 0"),
        (Grammar("choice", "[1]"), "a list of strings"),
        (Grammar("choice", '{"a": 1}'), "a list of strings"),
        (Grammar("choice", "[" * 100_000), "choice"),
        (Grammar("choice", json.dumps(["a"] * (MAX_CHOICES + 1))), f"got {MAX_CHOICES + 1}"),
        (Grammar("grammar", "start: foo"), "foo"),
        (Grammar("grammar", 'root ::= "a" | zzz'), "zzz"),
        (Grammar("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (Grammar("grammar", 'start: <|nope|> "a"'), "nope"),
        (Grammar("grammar", ""), "grammar"),
    ],
)
def test_rejects_invalid_grammars_with_a_short_message(vocabulary, grammar, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_grammar(grammar, vocabulary)
    assert len(caught.value.message) < MAX_MESSAGE_CHARS + 100


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "grammar"])
@pytest.mark.parametrize("unit", ["[", "(a|", '{"a":', "a{9,99}", "x: y\n", "\\", '"', "é", "\0"])
def test_rejects_nonsense_of_the_maximum_length_with_a_short_message(vocabulary, kind, unit):
    text = (unit * MAX_GRAMMAR_CHARS)[:MAX_GRAMMAR_CHARS]
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(Grammar(kind, text), vocabulary)
    assert len(caught.value.message) < MAX_MESSAGE_CHARS + 100


def test_rejects_a_pattern_that_fails_only_when_it_is_followed(vocabulary):
    with pytest.raises(InvalidRequestError, match="too many expressions"):
        check_grammar(Grammar("regex", "(a{1000}){1000}"), vocabulary)
