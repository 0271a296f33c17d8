"""Reasoning and tool calls in the same completion."""

import pytest

from jaxserve.parsing.parser import MessageParser
from jaxserve.parsing.registry import reasoning_parser, tool_parser

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXT = f"<think>\nUse {CALL}?\n</think>\n\nYes.\n{CALL}\n"


def parser_factory(reasoning, calls):
    return lambda: MessageParser(
        reasoning_parser("qwen3") if reasoning else None,
        tool_parser("hermes", {"f": {}}) if calls else None,
    )


def test_reads_calls_only_after_the_think_block(read_cut):
    completion = read_cut(parser_factory(True, True), TEXT)
    assert completion.reasoning == f"Use {CALL}?"
    assert completion.content == "Yes."
    assert completion.calls == [("f", "{}")]
    assert completion.num_complete == 1


def test_reads_reasoning_without_calls(read_cut):
    completion = read_cut(parser_factory(True, False), TEXT)
    assert (completion.reasoning, completion.content) == (f"Use {CALL}?", f"Yes.\n{CALL}\n")


def test_reads_calls_without_reasoning(read_cut):
    completion = read_cut(parser_factory(False, True), f"Yes.\n{CALL}\n")
    assert (completion.content, completion.calls) == ("Yes.", [("f", "{}")])


@pytest.mark.parametrize("text", ["", TEXT])
def test_all_text_is_content_without_parsers(read_cut, text):
    completion = read_cut(parser_factory(False, False), text)
    assert (completion.content, completion.reasoning, completion.calls) == (text, "", [])


def test_partial_markup_at_the_end_is_content(read_cut):
    completion = read_cut(parser_factory(True, True), "<think>a</think>b <tool_c")
    assert (completion.reasoning, completion.content) == ("a", "b <tool_c")
