"""Every format: cuts do not matter, no text is lost and the work is linear."""

import json
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.parsing.events import ToolCallStart
from jaxserve.parsing.forced_calls import json_array_calls, named_call
from jaxserve.parsing.parser import MessageParser, Parser
from jaxserve.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser,
    tool_parser,
)
from jaxserve.parsing.scanner import Scanner

TOOLS = {"f": {}, "g": {"properties": {"a": {"type": "string"}}}}
PARSERS = {
    **{name: lambda name=name: tool_parser(name, TOOLS) for name in TOOL_PARSERS},
    **{name: lambda name=name: reasoning_parser(name) for name in REASONING_PARSERS},
    "required": lambda: Parser(json_array_calls, tools=TOOLS),
    "named": lambda: Parser(named_call("f"), tools=TOOLS),
    "message": lambda: MessageParser(reasoning_parser("qwen3"), tool_parser("hermes", TOOLS)),
}
PIECES = [
    *("<tool_call>", "</tool_call>", "<tool_", "</tool_call", "<", ">", "</think>", "<think>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "[", "]", "<|python_tag|>", "<|python_"),
    *("<|python_start|>", "<|python_end|>", "<function=", "</function>", "<function=f>"),
    *("<parameter=", "<parameter=a>", "</parameter>", "f(", "a=", "a=1", ")", "[f(a=1", "'", "\\"),
    *('{"name": "f", "arguments": ', '{"name": "g"', '"parameters": {"a": ', '"arguments": "{}"'),
    *(
        '{"a": 1}',
        "{",
        "}",
        "}}",
        '"',
        ":",
        ",",
        ";",
        " ",
        "\n",
        "f",
        "g",
        "h",
        '"name":',
        "1",
        "-",
    ),
    *("true", "null", "é🔥", "\x00", "Hello ", "\\u00e9"),
]
COMPLETIONS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab<>[]{}\"'\\\n é🔥", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.text("abc", min_size=1, max_size=3)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(KEYS, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", PARSERS)
@given(text=COMPLETIONS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_cuts_do_not_matter_and_calls_are_whole(read, name, text, data):
    make_parser = PARSERS[name]
    whole = read(make_parser(), text)
    assert read(make_parser(), *text) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make_parser(), *pieces) == whole

    assert {function for function, _ in whole.calls} <= TOOLS.keys()
    num_whole = sum(is_object(arguments) for _, arguments in whole.calls)
    assert num_whole == whole.num_complete
    if not whole.calls and name in {*TOOL_PARSERS, "required", "named"}:
        assert whole.content == text
    characters = iter(text)  # the remaining text is in order
    assert all(char in characters for char in whole.reasoning + whole.content)


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def written(name, calls):
    """Writes calls as a model does; one string for each call or list of calls."""
    if name == "pythonic":
        texts = [f"{f}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for f, a in calls]
        return [f"[{', '.join(texts)}]"]
    if name == "qwen3_coder":
        return [
            f"<tool_call>\n<function={f}>\n"
            + "".join(f"<parameter={k}>\n{parameter_text(v)}\n</parameter>\n" for k, v in a.items())
            + "</function>\n</tool_call>"
            for f, a in calls
        ]
    if name == "mistral":
        return [f"[TOOL_CALLS]{f}[ARGS]{json.dumps(a)}" for f, a in calls]
    objects = [json.dumps({"name": f, "arguments": a}, ensure_ascii=False) for f, a in calls]
    if name == "hermes":
        return [f"<tool_call>\n{text}\n</tool_call>" for text in objects]
    assert name == "llama3_json"
    return [f"<|python_tag|>{'; '.join(objects)}"]


def parameter_text(value):
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(calls=CALLS, prose=st.sampled_from(["", "Let me see: é🔥", "a < b [1] {"]))
@settings(max_examples=40, deadline=None)
def test_parsing_reverses_writing(read, name, calls, prose):
    if name == "pythonic":
        prose = prose and prose + "<|python_start|>"
    if name == "qwen3_coder":  # its values are text without types or tags
        calls = [(f, {k: f"x{json.dumps(v)}" for k, v in a.items()}) for f, a in calls]
    text = prose + "\n".join(written(name, calls)) + "\n"
    completion = read(tool_parser(name, {"f": {}, "g": {}}), text)
    assert [(f, json.loads(a)) for f, a in completion.calls] == calls
    assert completion.num_complete == len(calls)
    assert completion.content == prose.removesuffix("<|python_start|>")


# Repeated beginnings of markup, for every state of a parser.
HOSTILE = [
    *('{"', "<tool_call", "</", "[", " ", "\\", '"a":1,', "[TOOL_CALLS][f("),
    *("<parameter=a>", '{"name": "f", "arguments": {}},'),
]
OPENINGS = {
    "hermes": ["", '<tool_call>{"', '<tool_call>{"name": "f", "arguments": {"a": '],
    "llama3_json": ["", '{"arguments": ', '{"name": "f", "parameters": {"a": "'],
    "mistral": ["", "[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"a": ['],
    "pythonic": ["", "[f(a=", "[f(a='"],
    "qwen3_coder": ["", "<function=f>", "<function=f><parameter=a>"],
    "deepseek_r1": [""],
    "message": ["", "<think>"],
    "required": ["", '[{"arguments": "'],
}


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize("size", [1, 10**6])
def test_work_is_linear(monkeypatch, name, size):
    """Four times the text takes about four times the work."""
    for opening in OPENINGS[name]:
        for hostile in HOSTILE:
            texts = [opening + hostile * (n // len(hostile)) for n in (250, 1000)]
            short, long = (work(monkeypatch, PARSERS[name], text, size) for text in texts)
            assert long < 5 * short + 200, (opening, hostile)


def work(monkeypatch, make_parser, text, size):
    """Counts calls and resumptions of functions, including built-in ones, and joined characters."""
    count = Counter()

    def profile(frame, event, arg):
        count["calls"] += event in ("call", "c_call")

    with monkeypatch.context() as patch:
        for method in ("take", "since"):
            patch.setattr(Scanner, method, counted(getattr(Scanner, method), count))
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            parser = make_parser()
            for start in range(0, len(text), size):
                parser.push(text[start : start + size])
            parser.finish()
        finally:
            sys.setprofile(before)
    return count.total()


def counted(method, count):
    def call(*args):
        text = method(*args)
        count["characters"] += len(text)
        return text

    return call


# After the last of the `OPENINGS`: the calls that have started, and the text that was shown of the
# opening. None: nothing is shown, since a value ends only with its tag.
STARTED = {
    "hermes": ([ToolCallStart(0, "f")], '{"a": '),
    "llama3_json": ([ToolCallStart(0, "f")], '{"a": "'),
    "mistral": ([ToolCallStart(0, "f")], '{"a": ['),
    "pythonic": ([], "[f(a='"),
    "qwen3_coder": ([ToolCallStart(0, "f")], None),
}


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_long_completion_of_partial_markup_starts_at_most_one_call(name):
    starts, shown = STARTED[name]
    nonsense = '<tool_call[TOOL_CALLS{"' * 4_000
    parser = PARSERS[name]()
    events = [event for char in OPENINGS[name][-1] + nonsense for event in parser.push(char)]
    events += parser.finish()
    assert [event for event in events if isinstance(event, ToolCallStart)] == starts
    text = "".join(event.text for event in events if not isinstance(event, ToolCallStart))
    assert text == ("" if shown is None else shown + nonsense)
    assert parser.num_complete_calls == 0
