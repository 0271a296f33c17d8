"""Calls that a request forces: an array of calls, or the arguments of one function."""

import pytest

from jaxserve.parsing.forced_calls import json_array_calls, named_call
from jaxserve.parsing.parser import Parser

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}, "g": {}}


@pytest.mark.parametrize(
    ("text", "content", "calls", "num_complete"),
    [
        (
            '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]\n',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
            2,
        ),
        (' [{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')], 0),
        ('[{"name": "f"', '[{"name": "f"', [], 0),
        ("Sorry, no.\n", "Sorry, no.\n", [], 0),
        ('[{"name": "h", "parameters": {}}]', '[{"name": "h", "parameters": {}}]', [], 0),
    ],
)
def test_reads_an_array_of_calls(read_cut, text, content, calls, num_complete):
    completion = read_cut(lambda: Parser(json_array_calls, tools=TOOLS), text)
    assert (completion.content, completion.calls, completion.num_complete) == (
        content,
        calls,
        num_complete,
    )


@pytest.mark.parametrize(
    ("text", "content", "arguments", "num_complete"),
    [
        ('{"a": {"b": 1}}', "", '{"a": {"b": 1}}', 1),
        (' {"a": 1} \n', "", '{"a": 1}', 1),
        ('{"a": 1} and', " and", '{"a": 1}', 1),
        ('{"a": "', "", '{"a": "', 0),
        ("[1]", "[1]", None, 0),
        ("", "", None, 0),
    ],
)
def test_reads_the_arguments_of_a_named_call(read_cut, text, content, arguments, num_complete):
    completion = read_cut(lambda: Parser(named_call("f"), tools=TOOLS), text)
    assert completion.calls == ([] if arguments is None else [("f", arguments)])
    assert (completion.content, completion.num_complete) == (content, num_complete)
