"""Any division of the tokens gives the same events; only content has stop strings."""

import random
from collections.abc import Callable, Sequence

import pytest

from jaxserve.front.parsed_text import ParsedText
from jaxserve.parsing.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from jaxserve.parsing.parser import MessageParser
from jaxserve.parsing.registry import reasoning_parser, tool_parser
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CALL = '<tool_call>{"name": "f", "arguments": {"a": "hello!"}}</tool_call>'


def make_parser() -> MessageParser:
    return MessageParser(reasoning_parser("qwen3"), tool_parser("hermes", {"f": {}}))


def read(text: str, sizes: Sequence[int] = (), **options):
    """Pushes ``sizes`` tokens at a time. Returns reasoning, content, calls, stop, tokens used."""
    options = {"skip_special_tokens": False} | options
    parsed = ParsedText(TOKENIZER, make_parser(), **options)
    ids = TOKENIZER.encode(text)
    reasoning = content = calls = ""
    used, stop, rest = 0, None, list(sizes)
    while used < len(ids) and stop is None:
        size = rest.pop() if rest else 1
        piece = ids[used : used + size]
        step = parsed.push(piece, finished=used + size >= len(ids))
        used, stop = used + step.num_tokens_used, step.stop_hit
        assert step.text_delta == "".join(
            e.text for e in step.events if isinstance(e, ContentDelta)
        )
        for event in step.events:
            match event:
                case ReasoningDelta():
                    reasoning += event.text
                case ContentDelta():
                    content += event.text
                case ToolCallStart():
                    calls += f"[{event.name}]"
                case ToolCallArguments():
                    calls += event.text
    return reasoning, content, calls, stop, used


@pytest.fixture
def read_any_way() -> Callable:
    """Reads a text in many divisions, which must give the same result."""

    def check(text: str, **options):
        one_by_one = read(text, **options)
        rng = random.Random(text)
        for _ in range(30):
            sizes = [rng.choice((1, 2, 5, 40)) for _ in range(100)]
            assert read(text, sizes, **options) == one_by_one, sizes
        return one_by_one

    return check


def test_separates_reasoning_content_and_calls(read_any_way) -> None:
    text = f"<think>hmm é</think>hello {CALL}"
    reasoning, content, calls, stop, used = read_any_way(text)
    assert (reasoning, content, calls) == ("hmm é", "hello", '[f]{"a": "hello!"}')
    assert stop is None
    assert used == len(TOKENIZER.encode(text))


def test_stop_strings_are_found_in_content_only(read_any_way) -> None:
    text = f"<think>well! {CALL}</think>hello {CALL} the end! more"
    reasoning, content, calls, stop, used = read_any_way(text, stop=("!", "zz"))
    assert reasoning == f"well! {CALL}"
    assert content.startswith("hello")
    assert content.endswith("the end")
    assert calls == '[f]{"a": "hello!"}'
    assert stop == "!"
    assert used == len(TOKENIZER.encode(text.removesuffix(" more")))
    _, kept, *_ = read_any_way(text, stop=("!",), include_stop=True)
    assert kept == content + "!"


def test_stop_strings_are_found_in_an_incomplete_call(read_any_way) -> None:
    text = 'Hi <tool_call>{"na!me'
    _, content, calls, stop, _ = read_any_way(text, stop=("!",))
    assert (content, calls, stop) == ('Hi <tool_call>{"na', "", "!")


@pytest.mark.parametrize("tail", ["", " z", f"{CALL}", "z the"])
def test_the_start_of_a_stop_string_is_not_lost(read_any_way, tail) -> None:
    _, content, _, stop, _ = read_any_way("hello z" + tail, stop=("z!", "zzz"))
    assert stop is None
    assert content == "hello z" + tail.replace(CALL, "")


def test_stop_strings_are_ignored_within_min_tokens(read_any_way) -> None:
    _, content, _, stop, _ = read_any_way("a!b!c!d", stop=("!",), min_tokens=4)
    assert (content, stop) == ("a!b!c", "!")


def test_special_tokens_show_only_on_request(read_any_way) -> None:
    assert read_any_way("he<|im_start|>llo")[1] == "he<|im_start|>llo"
    assert read_any_way("he<|im_start|>llo", skip_special_tokens=True)[1] == "hello"
