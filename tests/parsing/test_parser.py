import pytest

from jaxserve.parsing.parser import MessageParser
from jaxserve.parsing.registry import reasoning_parser, tool_parser

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXT = f"<think>\nUse {CALL}?\n</think>\n\nYes.\n{CALL}\n"


def make(reasoning, calls):
    return lambda: MessageParser(
        reasoning_parser("qwen3") if reasoning else None,
        tool_parser("hermes", {"f": {}}) if calls else None,
    )


def test_calls_are_read_after_the_block_only(read_cut):
    completion = read_cut(make(True, True), TEXT)
    assert completion.reasoning == f"Use {CALL}?"
    assert completion.content == "Yes."
    assert completion.calls == [("f", "{}")]
    assert completion.num_complete == 1


def test_reasoning_alone(read_cut):
    completion = read_cut(make(True, False), TEXT)
    assert (completion.reasoning, completion.content) == (f"Use {CALL}?", f"Yes.\n{CALL}\n")


def test_calls_alone(read_cut):
    completion = read_cut(make(False, True), f"Yes.\n{CALL}\n")
    assert (completion.content, completion.calls) == ("Yes.", [("f", "{}")])


@pytest.mark.parametrize("text", ["", TEXT])
def test_neither(read_cut, text):
    completion = read_cut(make(False, False), text)
    assert (completion.content, completion.reasoning, completion.calls) == (text, "", [])


def test_half_markup_at_the_end_of_both(read_cut):
    completion = read_cut(make(True, True), "<think>a</think>b <tool_c")
    assert (completion.reasoning, completion.content) == ("a", "b <tool_c")
