"""The pythonic format: a list of Python calls with literal arguments."""

import json

import pytest

from jaxserve.parsing.events import ToolCallArguments, ToolCallStart
from jaxserve.parsing.registry import tool_parser

TOOLS = {"f": {}, "g.h": {}}


def pythonic():
    return tool_parser("pythonic", TOOLS)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f()]", "", [("f", {})]),
        (
            """ [f(a=1, b='it\\'s "x"', c=[True, None, {'k': -0.5,}]) , g.h( z = "é" )] \n""",
            "",
            [
                ("f", {"a": 1, "b": 'it\'s "x"', "c": [True, None, {"k": -0.5}]}),
                ("g.h", {"z": "é"}),
            ],
        ),
        ("[f(), f(),]", "", [("f", {}), ("f", {})]),
        ("<|python_start|>[f(a=[])]<|python_end|>", "", [("f", {"a": []})]),
        ("See: <|python_start|>[f(a='])')] Done", "See: Done", [("f", {"a": "])"})]),
        ("[f(a=1), g.h(b=", ", g.h(b=", [("f", {"a": 1})]),
        ("[f(a=1), g.h(1)]", ", g.h(1)]", [("f", {"a": 1})]),
        ("[f(a=1) ", "", [("f", {"a": 1})]),
    ],
)
def test_reads_calls(read_cut, text, content, calls):
    completion = read_cut(pythonic, text)
    assert completion.content == content
    assert [(name, json.loads(text)) for name, text in completion.calls] == calls
    assert completion.num_complete == len(calls)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        "[1] is a footnote",
        "[f]",
        "[f](https://example.com)",
        "[f(",
        "[f(1)]",
        "[f(a)]",
        "[f(a=1",
        "[f(a=x)]",
        "[f(a=g())]",
        "[f(a=1 b=2)]",
        "[f(a=1, a=2)]",
        "[f(a-b=1)]",
        "[f(*a)]",
        "[f(a=1+1)]",
        "[unknown(a=1)]",
        "see [f(a=1)]",
        "<|python_start|>f()",
    ],
)
def test_other_text_is_unchanged_content(read_cut, text):
    completion = read_cut(pythonic, text)
    assert (completion.content, completion.calls) == (text, [])


def test_a_call_begins_when_it_is_complete():
    parser = pythonic()
    assert parser.push("[f(a=1") == []
    assert parser.push("), ") == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": 1}')]
