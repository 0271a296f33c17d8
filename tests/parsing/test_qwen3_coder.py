"""The Qwen3-Coder format: functions and parameters in tags."""

import json

import pytest

from jaxserve.parsing.events import ToolCallArguments, ToolCallStart
from jaxserve.parsing.registry import tool_parser

TOOLS = {
    "f": {
        "type": "object",
        "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
    },
    "g": {},
}


def qwen3_coder():
    return tool_parser("qwen3_coder", TOOLS)


def value(key, text):
    return f"<parameter={key}>\n{text}\n</parameter>\n"


def call(name, *values):
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call("g"), "", [("g", {})]),
        (
            "Look:\n" + call("f", value("s", "12"), value("n", "12"), value("o", "{'a': [True]}")),
            "Look:",
            [("f", {"s": "12", "n": 12, "o": {"a": [True]}})],
        ),
        (
            call("f", value("s", "<b>&lt;\n\n  if a < b:\n</p>")) + "\n" + call("g") + "\n",
            "",
            [("f", {"s": "<b>&lt;\n\n  if a < b:\n</p>"}), ("g", {})],
        ),
        (call("g", "<parameter=k>v</parameter>"), "", [("g", {"k": "v"})]),
        (call("g", "<parameter=k></parameter>") + " ok", " ok", [("g", {"k": ""})]),
        # Models sometimes omit tags.
        ("<function=g>\n</function>\nDone", "\nDone", [("g", {})]),
        ("<tool_call><function=g></tool_call>", "", [("g", {})]),
        (
            call("g", "<parameter=a>\n1\n<parameter=b>\n2\n"),
            "",
            [("g", {"a": 1, "b": 2})],
        ),
        ("<tool_call><tool_call><function=g></function>", "", [("g", {})]),
        (
            "<tool_call><function=g></function><function=f></function></tool_call>",
            "",
            [("g", {}), ("f", {})],
        ),
    ],
)
def test_reads_calls(read_cut, text, content, calls):
    completion = read_cut(qwen3_coder, text)
    assert completion.content == content
    assert [(name, json.loads(text)) for name, text in completion.calls] == calls
    assert completion.num_complete == len(calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=",
        "<tool_call>\n<function=f",
        "<tool_call><function=unknown><parameter=s>x</parameter></function></tool_call>",
        "<function= f></function>",
        "<tool_call>f()</tool_call>",
        "a <funct",
        "</function></tool_call>",
    ],
)
def test_other_text_is_unchanged_content(read_cut, text):
    completion = read_cut(qwen3_coder, text)
    assert (completion.content, completion.calls) == (text, [])


def test_a_truncated_call_is_a_partial_call(read_cut):
    completion = read_cut(qwen3_coder, "<function=f>" + value("n", "1") + "<parameter=s>\nhalf")
    assert (completion.content, completion.calls, completion.num_complete) == (
        "",
        [("f", '{"n": 1')],
        0,
    )


def test_malformed_text_within_a_call_is_content(read_cut):
    completion = read_cut(qwen3_coder, "<function=f>" + value("n", "1") + "oops</function>")
    assert (completion.content, completion.calls, completion.num_complete) == (
        "\noops</function>",
        [("f", '{"n": 1')],
        0,
    )


def test_each_value_is_emitted_when_it_is_complete():
    parser = qwen3_coder()
    assert parser.push("<tool_call>\n<function=f") == []
    assert parser.push(">\n<parameter=n>4") == [ToolCallStart(0, "f")]
    assert parser.push("2</parameter>") == [ToolCallArguments(0, '{"n": 42')]
    assert parser.push("<parameter=s>x</parameter></function>") == [
        ToolCallArguments(0, ', "s": "x"}')
    ]
