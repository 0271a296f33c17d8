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
def test_calls(read_cut, text, content, calls):
    answer = read_cut(mistral, text)
    assert (answer.content, answer.calls) == (content, calls)
    assert answer.num_complete == len(calls)


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
def test_what_is_no_call_is_content_to_the_letter(read_cut, text):
    answer = read_cut(mistral, text)
    assert (answer.content, answer.calls) == (text, [])


def test_a_list_that_goes_wrong_keeps_the_calls_before(read_cut):
    answer = read_cut(mistral, '[TOOL_CALLS][{"name": "f"}, {"name": "unknown"}]')
    assert (answer.content, answer.calls) == (', {"name": "unknown"}]', [("f", "{}")])


def test_a_cut_call_stays_a_partial_call(read_cut):
    answer = read_cut(mistral, '[TOOL_CALLS]f[ARGS]{"a": [tr')
    assert (answer.content, answer.calls, answer.num_complete) == ("", [("f", '{"a": [tr')], 0)
