"""Think blocks, including blocks that the prompt begins or ends."""

import pytest

from jaxserve.parsing.events import ContentDelta, ReasoningDelta
from jaxserve.parsing.registry import reasoning_parser

OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"
CLOSED_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nplan a < b\n</think>\n\nHello \n", "plan a < b", "Hello \n"),
        ("", "\n<think>plan</think>Hello", "plan", "Hello"),
        ("", "<think>\n\n</think>\n\nHello", "", "Hello"),
        ("", "<think></think>", "", ""),
        ("", "<think>a <think> b</think> c </think> d", "a <think> b", "c </think> d"),
        # Truncated blocks.
        ("", "<think>\nplan\n\n", "plan\n\n", ""),
        ("", "<think>plan </thi", "plan </thi", ""),
        ("", "<think>", "", ""),
        # Blocks that the prompt opens or closes.
        (OPEN_PROMPT, "\nplan\n</think>\n\nHello", "plan", "Hello"),
        (OPEN_PROMPT, "<think>\nplan</think>Hello", "plan", "Hello"),
        (OPEN_PROMPT, "plan", "plan", ""),
        (CLOSED_PROMPT, " Hello <think> </think>", "", " Hello <think> </think>"),
        (CLOSED_PROMPT, "<think>again</think>Hello", "again", "Hello"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_separates_think_blocks_from_content(read_cut, name, prompt, text, reasoning, content):
    completion = read_cut(lambda: reasoning_parser(name, prompt=prompt), text)
    assert (completion.reasoning, completion.content) == (reasoning, content)


@pytest.mark.parametrize(
    "text", ["Hello", "  Hello\n", "<thi", "", " ", "<b>", "Hello <think>a</think>", "a</think>b"]
)
def test_qwen3_without_a_block_is_unchanged_content(read_cut, text):
    completion = read_cut(lambda: reasoning_parser("qwen3"), text)
    assert (completion.reasoning, completion.content) == ("", text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plan</think>Hello", "plan", "Hello"),
        (" plan", "plan", ""),
        ("<thi", "<thi", ""),
        ("<b>plan</think></think>", "<b>plan", "</think>"),
    ],
)
def test_deepseek_r1_begins_within_a_block(read_cut, text, reasoning, content):
    completion = read_cut(lambda: reasoning_parser("deepseek_r1"), text)
    assert (completion.reasoning, completion.content) == (reasoning, content)


def test_text_is_held_back_only_while_it_could_be_a_tag_or_the_space_before_it():
    parser = reasoning_parser("qwen3")
    assert parser.push("<th") == []
    assert parser.push("ink>a") == [ReasoningDelta("a")]
    assert parser.push(" b \n</") == [ReasoningDelta(" b")]
    assert parser.push("c></think") == [ReasoningDelta(" \n</c>")]
    assert parser.push("> ") == []
    assert parser.push("d ") == [ContentDelta("d ")]
    assert parser.finish() == []
