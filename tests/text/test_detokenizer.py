"""The text of streamed tokens: incomplete characters, stop strings and special tokens."""

import itertools
import random

import pytest

from jaxserve.testing.tiny_tokenizer import tiny_tokenizer
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import TokenTextCache

CONTINUATIONS = (0x80, 0x90, 0xA0, 0xBF)


class Vocabulary:
    """A fake tokenizer: token i has the bytes ``table[i]``."""

    def __init__(self, table: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self.table, self.special = table, special

    def token_texts(self, *, skip_special_tokens: bool) -> TokenTextCache:
        return TokenTextCache(
            lambda i: self.table[i] if i < len(self.table) else b"",
            self.special if skip_special_tokens else frozenset(),
        )


def complete_text(data: bytes) -> str:
    """Returns the text of data without an incomplete character at its end.

    Python counts surrogates as characters here, and replaces them once they are complete.
    """
    for cut in range(min(3, len(data)), 0, -1):
        tail = data[len(data) - cut :]
        for length in range(1, 4):
            for rest in itertools.product(CONTINUATIONS, repeat=length):
                try:
                    if len((tail + bytes(rest)).decode(errors="surrogatepass")) == 1:
                        return data[:-cut].decode(errors="replace")
                except UnicodeDecodeError:
                    pass
    return data.decode(errors="replace")


def reference(
    tokens: list[bytes], stops: tuple[str, ...], *, include_stop: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Returns text, stop string and tokens used, by decoding from the start after every token."""
    unsearched = len(complete_text(b"".join(tokens[:min_tokens])))
    for used in range(min_tokens + 1, len(tokens) + 1):
        text = complete_text(b"".join(tokens[:used]))
        found = [
            (text.find(stop, unsearched), i)
            for i, stop in enumerate(stops)
            if text.find(stop, unsearched) >= 0
        ]
        if found:
            start, i = min(found)
            return text[:start] + (stops[i] if include_stop else ""), stops[i], used
    return b"".join(tokens).decode(errors="replace"), None, len(tokens)


def longest_hold(text: str, stops: tuple[str, ...]) -> int:
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


def run(detokenizer: Detokenizer, ids: list[int], rng: random.Random):
    """Pushes IDs in random groups; returns text, stop string, tokens used and the texts so far."""
    text, used, progress, at = "", 0, [], 0
    while True:
        size = rng.choice((1, 1, 1, 2, 5))
        group, at = ids[at : at + size], at + size
        added = detokenizer.push(group, finished=at >= len(ids))
        text += added.text_delta
        used += added.num_tokens_used
        progress.append((used, text))
        if added.stop_hit is not None or at >= len(ids):
            return text, added.stop_hit, used, progress


BYTE_TABLE = [
    *(b"a", b"b", b"ab", b"ba", b"aab", b" ", b" a", b"b b", b"", "é".encode(), "aé".encode()),
    *(b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x94", b"\xa5", b"\xff", b"\xed"),
    *(b"a\xe2\x82", b"\xacb", "€".encode(), "🔥".encode(), b"\xa0\x80"),
]
STOP_LETTERS = "aab é€\ufffd"


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_have_the_text_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = Vocabulary(BYTE_TABLE)
    for _ in range(250):
        ids = [rng.randrange(len(BYTE_TABLE)) for _ in range(rng.randrange(1, 14))]
        stops = tuple(
            "".join(rng.choices(STOP_LETTERS, k=rng.randrange(1, 6)))
            for _ in range(rng.randrange(4))
        )
        min_tokens, include_stop = rng.choice((0, 0, 2, 5)), rng.random() < 0.5
        expected = reference(
            [BYTE_TABLE[i] for i in ids], stops, include_stop=include_stop, min_tokens=min_tokens
        )
        for _ in range(3):
            detokenizer = Detokenizer(
                vocabulary,
                skip_special_tokens=True,
                stop=stops,
                include_stop=include_stop,
                min_tokens=min_tokens,
            )
            *result, _ = run(detokenizer, ids, rng)
            assert tuple(result) == expected, (ids, stops, min_tokens, include_stop)


@pytest.mark.parametrize("seed", range(4))
def test_holds_back_only_text_that_could_begin_a_stop_string(seed: int) -> None:
    rng = random.Random(100 + seed)
    vocabulary = Vocabulary([b"a", b"b", b"ab", b"c", "é".encode(), b"aa"])
    for _ in range(200):
        ids = [rng.randrange(6) for _ in range(10)]
        stops = tuple("".join(rng.choices("abcé", k=rng.randrange(3, 8))) for _ in range(2))
        detokenizer = Detokenizer(vocabulary, skip_special_tokens=True, stop=stops)
        *_, progress = run(detokenizer, ids, rng)
        for used, shown in progress[:-1]:
            so_far = b"".join(vocabulary.table[i] for i in ids[:used]).decode()
            assert shown == so_far[: len(so_far) - longest_hold(so_far, stops)], (ids, stops)


def pusher(stop=(), **options):
    """Returns a function that pushes tokens one by one and returns the text of each push."""

    def push_all(*tokens: str | bytes) -> list[str]:
        table = [t if isinstance(t, bytes) else t.encode() for t in tokens]
        detokenizer = Detokenizer(Vocabulary(table), skip_special_tokens=True, stop=stop, **options)
        shown = []
        for i in range(len(table)):
            added = detokenizer.push([i], finished=i == len(table) - 1)
            shown.append(added.text_delta)
            if added.stop_hit:
                break
        return shown

    return push_all


def test_bytes_are_held_until_the_character_is_complete() -> None:
    assert pusher()(b"\xf0", b"\x9f", b"\x94", b"\xa5", "ok") == ["", "", "", "🔥", "ok"]


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    assert pusher()("a", b"\xf0\x9f\x94") == ["a", "\ufffd"]
    assert pusher(stop=("zz",))("a", b"\xf0\x9f\x94") == ["a", "\ufffd"]


def test_finish_without_tokens_flushes_everything() -> None:
    for stop in ((), ("abc",)):
        detokenizer = Detokenizer(Vocabulary([b"ab\xe2\x82"]), skip_special_tokens=True, stop=stop)
        first = detokenizer.push([0], finished=False)
        last = detokenizer.push([], finished=True)
        assert first.text_delta + last.text_delta == "ab\ufffd"
        assert last.num_tokens_used == 0


def test_a_stop_string_may_span_tokens() -> None:
    push_all = pusher(stop=("beta gamma",))
    assert push_all("alpha", " beta", " gamma", " delta") == ["alpha", " ", ""]
    push_all = pusher(stop=("beta gamma",), include_stop=True)
    assert push_all("alpha", " beta", " gamma", " delta") == ["alpha", " ", "beta gamma"]


def test_the_start_of_a_stop_string_is_not_shown() -> None:
    assert pusher(stop=("\nUser:",))("hi", "\nUser", ":", "x") == ["hi", "", ""]


def test_held_text_is_shown_if_no_stop_string_follows() -> None:
    assert pusher(stop=("\nUser:",))("hi", "\nUs", "e", "d") == ["hi", "", "", "\nUsed"]
    assert pusher(stop=("\nUser:",))("end\nUs") == ["end\nUs"]


def test_a_stop_string_may_be_inside_a_token() -> None:
    assert pusher(stop=("ob",))(" foobar") == [" fo"]


def test_a_long_stop_string_that_never_begins_holds_nothing_back() -> None:
    shown = pusher(stop=("Z" * 500,))(*["word "] * 20)
    assert shown == ["word "] * 20


def test_the_earliest_stop_string_wins_then_the_first_listed() -> None:
    for stops, winner in (
        (("d", "bc"), "bc"),
        (("bcd", "bc"), "bcd"),
        (("bc", "bcd"), "bc"),
        (("c", "bcd"), "bcd"),
    ):
        detokenizer = Detokenizer(Vocabulary([b"abcde"]), skip_special_tokens=True, stop=stops)
        added = detokenizer.push([0], finished=False)
        assert (added.stop_hit, added.num_tokens_used) == (winner, 1)


def test_the_stop_string_that_is_complete_first_wins_in_any_grouping() -> None:
    vocabulary = Vocabulary([b"abc", b"d"])
    for groups in ([[0], [1]], [[0, 1]]):
        detokenizer = Detokenizer(vocabulary, skip_special_tokens=True, stop=("abcd", "bc"))
        added = detokenizer.push(groups[0], finished=False)
        assert (added.text_delta, added.stop_hit, added.num_tokens_used) == ("a", "bc", 1)


def test_stop_strings_in_the_first_min_tokens_are_ignored() -> None:
    push_all = pusher(stop=("STOP",), min_tokens=3)
    assert push_all("a", "STOP", "b", "STOP", "c") == ["a", "STOP", "b", ""]
    # Text of the first tokens is shown at once and cannot begin a stop string.
    assert pusher(stop=("STOP",), min_tokens=1)("ST", "OP", "x") == ["ST", "OP", "x"]


def test_special_tokens_are_skipped_on_request() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("hello<|im_end|><think> world")
    for skip, expected in ((True, "hello<think> world"), (False, "hello<|im_end|><think> world")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        shown = "".join(detokenizer.push([i], finished=False).text_delta for i in ids)
        assert shown == expected


def test_a_leading_space_is_kept() -> None:
    assert pusher()(" Hello", " world") == [" Hello", " world"]


def test_unknown_ids_have_no_text() -> None:
    detokenizer = Detokenizer(Vocabulary([b"a"]), skip_special_tokens=True)
    assert detokenizer.push([0, 7, 0], finished=True).text_delta == "aa"


def test_a_push_after_the_end_is_an_error() -> None:
    for stop, finished in ((("a",), False), ((), True), (("b",), True)):
        detokenizer = Detokenizer(Vocabulary([b"a"]), skip_special_tokens=True, stop=stop)
        detokenizer.push([0], finished=finished)
        with pytest.raises(AssertionError, match="after the end"):
            detokenizer.push([0], finished=False)
