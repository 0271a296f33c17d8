"""The Mistral formats: [TOOL_CALLS] before a list of calls or before each call."""

import pytest

from jaxserve.parsing.registry import tool_parser

TOOLS = {"f": {}, "g-2": {}}


def mistral():
    return tool_parser("mistral", TOOLS)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}]', "", [("f", '{"a": "]"}')]),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"},\n'
            ' {"arguments": {"b": 2}, "name": "g-2"}]',
            "",
            [("f", "{}"), ("g-2", '{"b": 2}')],
        ),
        ('Yes [1]. [TOOL_CALLS][{"name": "f"}] So.', "Yes [1]. So.", [("f", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": {}}', "", [("f", '{"a": {}}')]),
        ('[TOOL_CALLS]f{"a": {}}\n', "", [("f", '{"a": {}}')]),
        (
            'Hm.[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g-2[CALL_ID]abc123XYZ[ARGS] {"b": 2}',
            "Hm.",
            [("f", "{}"), ("g-2", '{"b": 2}')],
        ),
        ('[TOOL_CALLS]{"name": "f"}', "", [("f", "{}")]),
    ],
)
def test_reads_calls(read_cut, text, content, calls):
    completion = read_cut(mistral, text)
    assert (completion.content, completion.calls) == (content, calls)
    assert completion.num_complete == len(calls)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CA",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS] [[1]]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARG",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS]f[CALL_ID]1{}",
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS][ARGS]{}",
        '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]',
        'see [1] and [{"name": "f"}]',
    ],
)
def test_other_text_is_unchanged_content(read_cut, text):
    completion = read_cut(mistral, text)
    assert (completion.content, completion.calls) == (text, [])


def test_an_invalid_list_keeps_the_calls_before_the_error(read_cut):
    completion = read_cut(mistral, '[TOOL_CALLS][{"name": "f"}, {"name": "unknown"}]')
    assert (completion.content, completion.calls) == (', {"name": "unknown"}]', [("f", "{}")])


def test_a_truncated_call_is_a_partial_call(read_cut):
    completion = read_cut(mistral, '[TOOL_CALLS]f[ARGS]{"a": [tr')
    assert (completion.content, completion.calls, completion.num_complete) == (
        "",
        [("f", '{"a": [tr')],
        0,
    )
