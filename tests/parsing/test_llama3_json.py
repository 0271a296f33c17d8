"""The Llama 3 format: calls are JSON objects, alone or after <|python_tag|>."""

import pytest

from jaxserve.parsing.registry import tool_parser

TOOLS = {"f": {}, "g": {}}
CALL = '{"name": "f", "parameters": {"a": "x; {"}}'
ARGUMENTS = '{"a": "x; {"}'
TAG = "<|python_tag|>"


def llama3_json():
    return tool_parser("llama3_json", TOOLS)


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (CALL, "", 1),
        (f"\n\n{CALL}\n", "", 1),
        (f"{TAG}{CALL}", "", 1),
        (f"{CALL}; {CALL};{CALL}", "", 3),
        (f"{CALL}\n{CALL}", "", 2),
        (f"{TAG} {CALL}; {TAG}{CALL}", "", 2),
        (f"Right. {TAG}{CALL}", "Right.", 1),
        (f"{CALL}; so be it", "; so be it", 1),
        (f"{CALL}; <b> {TAG}{CALL}", "; <b>", 2),
        (f"{CALL}; ", "", 1),
        (f"{CALL};\n{TAG[:7]}", "", 1),
    ],
)
def test_reads_calls(read_cut, text, content, num_calls):
    completion = read_cut(llama3_json, text)
    assert (completion.content, completion.calls) == (content, [("f", ARGUMENTS)] * num_calls)
    assert completion.num_complete == num_calls


@pytest.mark.parametrize(
    "text",
    [
        f"For example: {CALL}",
        '{"name": "Alice", "age": 30}',
        '{"name": "f", "age": 30}',
        '{"answer": {"name": "f", "parameters": {}}}',
        f"{TAG}print(1)",
        "{}",
        "{",
        '  {"name": "f"',
        TAG[:5],
        TAG,
    ],
)
def test_other_text_is_unchanged_content(read_cut, text):
    completion = read_cut(llama3_json, text)
    assert (completion.content, completion.calls) == (text, [])


def test_a_truncated_second_call_is_content(read_cut):
    completion = read_cut(llama3_json, f'{CALL}; {{"name": "g"')
    assert (completion.content, len(completion.calls)) == ('; {"name": "g"', 1)
