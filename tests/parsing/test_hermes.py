"""The Hermes format: calls are JSON objects in <tool_call> tags."""

import pytest

from jaxserve.parsing.events import ContentDelta, ToolCallArguments, ToolCallStart
from jaxserve.parsing.registry import tool_parser

TOOLS = {"f": {}, "g": {}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, -2.5e3, "x\\"}"], "b": {}}}\n</tool_call>'
ARGUMENTS = '{"a": [1, -2.5e3, "x\\"}"], "b": {}}'


def hermes():
    return tool_parser("hermes", TOOLS)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("Just text < 5 and <b>.\n", "Just text < 5 and <b>.\n", []),
        (CALL, "", [("f", ARGUMENTS)]),
        (f"Let me see. \n\n{CALL}\n", "Let me see.", [("f", ARGUMENTS)]),
        (f"{CALL}\n{CALL}", "", [("f", ARGUMENTS)] * 2),
        (f"{CALL}{CALL} Done. ", " Done. ", [("f", ARGUMENTS)] * 2),
        ('<tool_call>{"name":"g"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name":"g","arguments":null}</tool_call>', "", [("g", "{}")]),
        # Arguments first, under another name, with other keys.
        ('<tool_call>{"arguments":{"a":1},"name":"g"}</tool_call>', "", [("g", '{"a":1}')]),
        (
            '<tool_call>{"id":7,"name":"g","parameters":{"a":1},"why":[{}]}</tool_call>',
            "",
            [("g", '{"a":1}')],
        ),
        # Arguments as a string that holds JSON.
        (
            r'<tool_call>{"name":"g","arguments":"{\"a\": \"\u00e9\"}"}</tool_call>',
            "",
            [("g", '{"a": "é"}')],
        ),
        # Several calls in one pair of tags.
        (
            '<tool_call>[{"name":"f"}, {"name":"g","arguments":{}}]</tool_call>!',
            "!",
            [("f", "{}"), ("g", "{}")],
        ),
    ],
)
def test_reads_well_formed_calls(read_cut, text, content, calls):
    completion = read_cut(hermes, text)
    assert (completion.content, completion.calls) == (content, calls)
    assert completion.num_complete == len(calls)


@pytest.mark.parametrize(
    "tail",
    [
        '{"name":"g","arguments":{}}}</tool_call>',
        '{"name":"g","arguments":{}\n</tool_call>',
        '{"name":"g","arguments":{}}',
        '{"name":"g","arguments":{}}\n</tool',
        '{"name":"g","arguments":{}}]} \n</tool_call>\n',
        '{"name":"g","arguments":{}, oops}</tool_call>',
    ],
)
def test_errors_after_the_arguments_do_not_affect_the_call(read_cut, tail):
    completion = read_cut(hermes, f"<tool_call>{tail}")
    assert completion.calls == [("g", "{}")]
    assert completion.num_complete == 1
    assert "arguments" not in completion.content


def test_a_missing_end_tag_does_not_hide_the_next_call(read_cut):
    call = '<tool_call>{"name":"g","arguments":{}}\n'
    completion = read_cut(hermes, call * 3)
    assert (completion.content, completion.calls) == ("", [("g", "{}")] * 3)


@pytest.mark.parametrize(
    "text",
    [
        "Sure <tool_c",
        'Hi <tool_call>{"na',
        "<tool_call>",
        "<tool_call>\n\n",
        "<tool_call></tool_call>",
        "<tool_call>get_weather(city)</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "age": 5}</tool_call>',
        '<tool_call>{"arguments": {"a": tru}, "name": "f"}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f",',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>{"name": "unknown", "arguments": {"name": "f"}}</tool_call>\nWell.',
        '<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>',
    ],
)
def test_other_text_is_unchanged_content(read_cut, text):
    completion = read_cut(hermes, text)
    assert (completion.content, completion.calls) == (text, [])


def test_reads_a_call_after_an_invalid_call(read_cut):
    text = 'a <tool_call>{"name": "f\n<tool_call>{"name": "g", "arguments": {}}</tool_call> b'
    completion = read_cut(hermes, text)
    assert completion.content == 'a <tool_call>{"name": "f b'
    assert completion.calls == [("g", "{}")]


def test_a_call_truncated_in_its_arguments_is_a_partial_call(read_cut):
    completion = read_cut(hermes, 'x <tool_call>{"name": "f", "arguments": {"a": "b\\')
    assert (completion.content, completion.calls) == ("x", [("f", '{"a": "b\\')])
    assert completion.num_complete == 0


def test_invalid_arguments_end_at_the_error(read_cut):
    completion = read_cut(
        hermes, '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call>'
    )
    assert completion.calls == [("f", '{"a": 1, ')]
    assert completion.num_complete == 0
    assert completion.content == "b: 2}}</tool_call>"


def test_control_characters_in_strings_become_escapes(read_cut):
    text = '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb\x00"}}</tool_call>'
    completion = read_cut(hermes, text)
    assert completion.calls == [("f", '{"code": "a\\u000a\\u0009b\\u0000"}')]


def test_arguments_are_emitted_as_they_arrive():
    parser = hermes()
    assert parser.push('Yes. <tool_call>{"name": "f", "argum') == [ContentDelta("Yes.")]
    assert parser.push('ents": ') == []
    assert parser.push('{"a') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a')]
    assert parser.push('": ') == [ToolCallArguments(0, '": ')]
    assert parser.push("1}}</tool_call> B") == [ToolCallArguments(0, "1}"), ContentDelta(" B")]
    assert parser.push("ye <") == [ContentDelta("ye")]
    assert parser.finish() == [ContentDelta(" <")]


def test_any_name_can_be_called_without_a_list_of_tools(read):
    text = '<tool_call>{"name": "any.name-1"}</tool_call><tool_call>{"name": "no name"}</tool_call>'
    completion = read(tool_parser("hermes"), text)
    assert completion.calls == [("any.name-1", "{}")]
    assert completion.content == '<tool_call>{"name": "no name"}</tool_call>'


def test_an_empty_list_of_tools_allows_no_calls(read):
    assert read(tool_parser("hermes", {}), CALL).content == CALL


def test_an_unknown_call_after_a_known_one_is_content(read_cut):
    completion = read_cut(hermes, '<tool_call>[{"name":"f"}, {"name":"x"}]</tool_call>')
    assert (completion.content, completion.calls) == (', {"name":"x"}]</tool_call>', [("f", "{}")])


@pytest.mark.parametrize("end", ["</tool_call>", ""])
@pytest.mark.parametrize("half", ["<tool_call>", '<tool_call>{"na'])
def test_half_of_a_second_call_is_content(read_cut, end, half):
    completion = read_cut(hermes, f'<tool_call>{{"name":"f"}}{end}{half}')
    assert (completion.content, completion.calls) == (half, [("f", "{}")])
