"""The structure of JSON is counted the same however it is cut, and bounds the time to decode it.

Times are processor times of the thread in units of `machine_speed.DECODING`, so that they depend
neither on the machine nor on what else it does.
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from jaxserve.config import MIB
from jaxserve.errors import InvalidRequestError
from jaxserve.openai.decoding import decode
from jaxserve.openai.json_structure import (
    BRACKET_BYTES,
    BYTES_OF_ASCII,
    BYTES_OF_UTF8,
    COMMA_BYTES,
    MAX_DIGITS,
    QUOTE_BYTES,
    JsonStructure,
)
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.testing.machine_speed import DECODING, MAX_HOLD_S
from server.settings import ApiSettings

API = ApiSettings()


def reference(text: bytes) -> int:
    """Counts byte by byte."""
    in_string, is_escaped = False, False
    size = len(text) // (BYTES_OF_ASCII if max(text) < 128 else BYTES_OF_UTF8)
    for byte in text:
        char = chr(byte)
        size += char == "\\"
        if in_string and is_escaped:
            size += char == "u"
            is_escaped = False
            continue
        is_escaped = in_string and char == "\\"
        if char == '"':
            in_string = not in_string
            size += 1 + QUOTE_BYTES
        elif not in_string and char not in " \t\r\n":
            size += 1 + BRACKET_BYTES * (char in "[{") + COMMA_BYTES * (char == ",")
    return size


def count(text: bytes, cuts: list[int]) -> JsonStructure:
    structure = JsonStructure()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        structure.add(text[start:end])
    return structure


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        return rng.choice([None, True, 0, -1.5e300, 10**17, 51234])
    if kind < 4:
        return "".join(rng.choices('ab",:[]{}\\\n ệ\U0001f525', k=rng.randrange(12)))
    values = [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind < 6:
        return values
    return {str(random_value(rng, 0)): value for value in values}


@pytest.mark.parametrize("seed", range(200))
def test_the_count_does_not_depend_on_the_cuts(seed) -> None:
    rng = random.Random(seed)
    value = [random_value(rng, 4) for _ in range(4)]
    options = {"ensure_ascii": rng.random() < 0.5, "indent": rng.choice([None, 1])}
    text = json.dumps(value, **options).encode()
    expected = reference(text)
    assert count(text, []).size == expected
    assert count(text, list(range(1, len(text)))).size == expected
    for _ in range(5):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
        assert count(text, cuts).size == expected, cuts


def test_text_inside_strings_does_not_count() -> None:
    commas = json.dumps({"prompt": "a, [b], {c}: d" * 1000}).encode()
    size = count(commas, []).size
    assert size == reference(commas)
    assert size - len(commas) // BYTES_OF_ASCII < 200
    # It takes longer if it is not ASCII, wherever that begins.
    text = f'"{"a" * 5000}ệ{"a" * 5000}"'.encode()
    for cuts in ([], [100], [5002], [9000]):
        assert count(text, cuts).size == reference(text) > len(text) // BYTES_OF_UTF8


def test_numbers_with_many_digits_are_noticed() -> None:
    longest = b"[" + b"1234567890" * 12 + b"9" * (MAX_DIGITS - 120)
    assert not count(longest + b"]", []).has_long_number
    assert count(longest + b"0]", []).has_long_number
    assert not count(b'["' + b"1" * 1000 + b'"]', []).has_long_number
    assert not count(b"[" + b"1.5," * 1000 + b"1]", []).has_long_number
    # Each piece of a longer number is noticed, unless both parts are short.
    assert count(longest[:50] + longest[50:] * 3, [50]).has_long_number


def units() -> Iterator[tuple[str, type[msgspec.Struct], str, str, str]]:
    """Yields a name, a type, and the start, repeated part and end of a body."""
    for name, unit in (
        *(("arrays", "[],"), ("objects", "{},"), ("nested", '{"a":[1]},'), ("strings", '"",')),
        *(("utf8", '"Việt",'), ("utf8 texts", f'"{"Việt" * 8}",'), ("digits", "1,")),
        *(("ids", "51234,"), ("spaced ids", "51234, "), ("long", "9" * 20 + ",")),
        *(("longest", "9" * MAX_DIGITS + ","), ("floats", "1.2345678901234567e-300,")),
        ("rare floats", "1." + "0123456789" * 8 + "e-5,"),
    ):
        yield name, ResponsesRequest, '{"input":"a","metadata":{"a":[', unit, "0]}}"
        yield name + " prompt", CompletionRequest, '{"prompt":[', unit, "0]}"
    yield "many lists", CompletionRequest, '{"prompt":[', "[" + "1," * 3999 + "1],", "[1]]}"
    yield "messages", ChatRequest, '{"messages":[', '{"role":"user","content":"a"},', "{}]}"
    yield "newlines", CompletionRequest, '{"prompt":"', "\\n", '"}'
    yield "escapes", CompletionRequest, '{"prompt":"', "\\u1234", '"}'
    yield "deep", CompletionRequest, '{"prompt":', "[", "0"
    yield "spaces", CompletionRequest, "{", " ", '"prompt":"a"}'
    yield "text", CompletionRequest, '{"prompt":"', "Chào, thế giới. ", '"}'


def structure(text: str) -> int:
    """Returns the size of a text, less that of its bytes alone."""
    data = text.encode()
    return count(data, []).size - bytes_size(len(data), text)


def bytes_size(num_bytes: int, text: str) -> int:
    return num_bytes // (BYTES_OF_ASCII if text.isascii() else BYTES_OF_UTF8)


def largest_body(start: str, unit: str, end: str, *, text: str) -> bytes:
    """Returns a body that is as large as the limits allow, with as many of ``unit`` as fit.

    The rest is filled up with a long string of ``text``.
    """
    room = API.max_body_bytes - 200
    per_unit = (structure(start + unit * 8 + end) - structure(start + end)) / 8
    num_units = room // len(unit.encode())
    if per_unit:
        left = API.max_json_structure_bytes - 500 - bytes_size(room, unit + text)
        num_units = min(num_units, int(left / per_unit))
    units = (start + unit * num_units + end).encode()
    num_texts = (room - len(units)) // len(text.encode())
    return units[:-1] + b',"user":"' + (text * num_texts).encode() + b'"}'


def shortest_time(call: Callable[[], object]) -> float:
    """Returns the shortest processor time of a few tries, in seconds of the reference machine.

    Each try is divided by the slowness of the machine at that moment.
    """
    times = []
    for _ in range(9):
        with DECODING.measuring() as slowness:
            start = time.thread_time()
            call()
            seconds = time.thread_time() - start
        times.append(seconds / slowness.value)
    return min(times)


@pytest.mark.parametrize("text", ["a", "ệ", "Chào, thế giới. "], ids=["ascii", "utf8", "mixed"])
@pytest.mark.parametrize("case", list(units()), ids=lambda case: case[0])
def test_the_largest_bodies_are_decoded_in_a_short_time(case, text) -> None:
    """See `shortest_time`. With a limit for the plain time, the test would measure the machine."""
    _, body_type, *parts = case
    body = largest_body(*parts, text=text)
    assert API.max_body_bytes * 0.9 < len(body) <= API.max_body_bytes
    size = count(body, list(range(65536, len(body), 65536))).size
    assert size <= API.max_json_structure_bytes

    def call() -> None:
        with contextlib.suppress(InvalidRequestError):
            decode(body, body_type)

    seconds = shortest_time(call)
    print(f"DECODED {seconds * 1e3:.1f} ms", file=sys.stderr)
    assert seconds < MAX_HOLD_S


@pytest.mark.parametrize("tail", [b"", b'"', b"\\ud83d", b"\\ud83"])
def test_errors_of_large_bodies_are_found_in_a_short_time(tail) -> None:
    for text in (b"\\ud83d\\ude00" * 600_000, b"a" * 8 * MIB, b" " * 8 * MIB):
        body = b'{"prompt":"' + text[: API.max_body_bytes - 20] + tail
        reason = "surrogate" if tail == b"\\ud83d" else "too early"

        def call(body: bytes = body, reason: str = reason) -> None:
            with pytest.raises(InvalidRequestError, match=reason):
                decode(body, CompletionRequest)

        assert shortest_time(call) < MAX_HOLD_S


def test_legitimate_large_bodies_are_within_the_limit() -> None:
    rng = random.Random(0)
    vocab = 152_000
    bodies = [
        {"prompt": [rng.randrange(vocab) for _ in range(128 * 1024)]},
        {"prompt": [[rng.randrange(vocab) for _ in range(2048)] for _ in range(100)]},
        {"prompt": "One, two; [three], {four}: five. " * 250_000},
        {"prompt": 'print("a\\n", {"b": 1})\n' * 250_000},
        {"prompt": "đã có rồi, thưa ngài. " * 150_000},
        {"prompt": "a", "logit_bias": {str(i): 100 for i in range(49_152)}},
        {"prompt": "a", "allowed_token_ids": list(range(vocab))},
        {"messages": [{"role": "user", "content": "hello, world"}] * 10_000},
    ]
    for body in bodies:
        text = json.dumps(body, ensure_ascii=False).encode()
        assert len(text) <= API.max_body_bytes, str(body)[:40]
        assert count(text, []).size <= API.max_json_structure_bytes, str(body)[:40]
