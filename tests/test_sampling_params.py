"""Sampling parameters: bounds, values that are rejected, and errors that name the field."""

import math
from collections import OrderedDict
from enum import IntEnum
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    SamplingParams,
    check_ids,
)

BAD = [
    ("n", 0),
    ("n", MAX_N + 1),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("top_k", 2**63),
    ("min_tokens", 2**63),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("logprobs", -2),
    ("logprobs", 2**63),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", 2**63),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
    ("stop", ("",)),
    ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
    ("pooling", "sum"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_rejects_a_bad_value_and_names_its_field(field: str, value) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(field)
    assert "got" in caught.value.message


EDGES = [
    ("n", MAX_N),
    ("temperature", 0.0),
    ("temperature", 100.0),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("min_p", 1.0),
    ("seed", 2**63 - 1),
    ("seed", -(2**63)),
    ("max_tokens", 1),
    ("presence_penalty", -2.0),
    ("repetition_penalty", 1e-3),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
    ("logit_bias", {}),
    ("logit_bias", {5: 1e300}),
    ("allowed_token_ids", (1,)),
    ("bad_words_token_ids", ((1,), (2,) * MAX_BAD_WORD_TOKENS)),
    ("logprobs", -1),
    ("prompt_logprobs", 100_000),
    ("stop", ("x",) * MAX_STOP_STRINGS),
    ("stop_token_ids", (1,) * MAX_STOP_TOKEN_IDS),
]


@pytest.mark.parametrize(("field", "value"), EDGES)
def test_accepts_the_bounds_of_each_range(field: str, value) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


CONVERTED = [
    # (field, value, the value in the params)
    ("n", np.int64(2), 2),
    ("n", IntEnum("Count", ["ONE", "TWO"]).TWO, 2),  # type: ignore[attr-defined]
    ("max_tokens", np.array(7), 7),
    ("seed", np.uint8(3), 3),
    ("temperature", 0, 0.0),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", np.float64(0.5), 0.5),
    ("top_p", np.int32(1), 1.0),
    ("repetition_penalty", Fraction(3, 2), 1.5),
    ("ignore_eos", np.True_, True),
    ("stop", "END", ("END",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", np.array(["a", "b"]), ("a", "b")),
    ("stop", np.str_("ab"), ("ab",)),
    ("stop", (text for text in "ab"), ("a", "b")),
    ("stop", None, ()),
    ("stop_token_ids", [7, 8], (7, 8)),
    ("stop_token_ids", {7}, (7,)),
    ("stop_token_ids", range(3), (0, 1, 2)),
    ("stop_token_ids", np.array([7, 8], np.uint16), (7, 8)),
    ("stop_token_ids", (np.int32(7), 8), (7, 8)),
    ("stop_token_ids", None, ()),
    ("allowed_token_ids", [1, 2], (1, 2)),
    ("bad_words_token_ids", [[1, 2], (3,)], ((1, 2), (3,))),
    ("bad_words_token_ids", ([1, 2],), ((1, 2),)),
    ("bad_words_token_ids", ((np.int64(1), 2),), ((1, 2),)),
    ("bad_words_token_ids", np.array([[1, 2]]), ((1, 2),)),
    ("bad_words_token_ids", None, ()),
    ("logit_bias", {"50256": -100, 5: np.float32(0.5)}, {50256: -100.0, 5: 0.5}),
    ("logit_bias", {np.int64(5): 1.0}, {5: 1.0}),
    ("logit_bias", {5: True}, None),
    ("extra_args", OrderedDict(alpha=np.int64(1)), {"alpha": 1}),
    ("grammar", {"kind": "regex", "spec": "a+"}, Grammar("regex", "a+")),
]
"""None as the last value: the value is refused."""


def exact(value):
    """Returns a value with the types of all its parts, so that 1, 1.0 and True differ."""
    parts = ()
    if isinstance(value, tuple | list):
        parts = tuple(map(exact, value))
    elif isinstance(value, dict):
        parts = tuple((exact(key), exact(item)) for key, item in value.items())
    return type(value), value, parts


@pytest.mark.parametrize(("field", "value", "expected"), CONVERTED)
def test_converts_values_that_mean_the_same(field: str, value, expected) -> None:
    if expected is None:
        with pytest.raises(InvalidRequestError, match=field):
            SamplingParams(**{field: value})
        return
    params = SamplingParams(**{field: value})
    assert exact(getattr(params, field)) == exact(expected)
    # A converted value is one that the engine could decode.
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


WRONG_TYPES = [
    ("n", 1.0, "n must be an integer, got 1.0"),
    ("n", True, "n must be an integer, got True"),
    ("n", None, "n must be an integer, got None"),
    ("seed", 1.5, "seed must be an integer, got 1.5"),
    ("seed", np.float64(2), "seed must be an integer, got .*2.0"),
    ("max_tokens", "16", "max_tokens must be an integer, got '16'"),
    ("top_k", np.True_, "top_k must be an integer"),
    ("temperature", "0.5", "temperature must be a number, got '0.5'"),
    ("temperature", None, "temperature must be a number, got None"),
    ("temperature", 1j, "temperature must be a number, got 1j"),
    ("temperature", [0.5], r"temperature must be a number, got \[0.5\]"),
    ("temperature", 10**400, "temperature must be a number, got 1000"),
    ("top_p", True, "top_p must be a number, got True"),
    ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
    ("detokenize", "no", "detokenize must be true or false, got 'no'"),
    ("stop", b"END", "stop must be a string or a list of strings, got b'END'"),
    ("stop", 5, "stop must be a string or a list of strings, got 5"),
    ("stop", ["a", 5], r"stop must be a string or a list of strings, got \['a', 5\]"),
    ("stop_token_ids", 7, "stop_token_ids must be a list of token IDs, got 7"),
    ("stop_token_ids", "7", "stop_token_ids must be a list of token IDs, got '7'"),
    ("stop_token_ids", [7.0], r"stop_token_ids must be a list of token IDs, got \[7.0\]"),
    ("stop_token_ids", (True,), r"stop_token_ids must be a list of token IDs, got \(True,\)"),
    ("allowed_token_ids", b"abc", "allowed_token_ids must be a list of token IDs"),
    ("bad_words_token_ids", [1, 2], "bad_words_token_ids must be a list of lists of token IDs"),
    ("bad_words_token_ids", ["word"], "bad_words_token_ids must be a list of lists of token IDs"),
    ("logit_bias", [5], "logit_bias must be a dict of token IDs and numbers"),
    ("logit_bias", {"five": 1}, "logit_bias must be a dict of token IDs and numbers"),
    ("logit_bias", {5: "1"}, "logit_bias must be a dict of token IDs and numbers"),
    ("logit_bias", {1.0: 1}, "logit_bias must be a dict of token IDs and numbers"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias must be a dict of token IDs and numbers"),
    ("extra_args", {1: nested(10_000)}, "extra_args must be a dict whose keys are strings"),
    ("extra_args", [("a", 1)], "extra_args must be a dict whose keys are strings"),
    ("extra_args", {1: 2}, "extra_args must be a dict whose keys are strings"),
    ("pooling", True, "pooling must be 'last' or 'mean', got True"),
    ("grammar", "a+", "grammar must be a Grammar, got 'a\\+'"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG_TYPES)
def test_rejects_a_value_of_another_type_and_names_its_field(field, value, message) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    with pytest.raises(InvalidRequestError, match=message):
        msgspec.structs.replace(SamplingParams(), **{field: value})


def test_the_message_about_a_type_is_short() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop_token_ids=["7"] * 100_000)  # type: ignore[list-item]
    assert len(caught.value.message) < 300


def test_a_grammar_has_a_known_kind_and_is_text() -> None:
    with pytest.raises(InvalidRequestError, match="of the kind json_schema.* got 'yaml'"):
        Grammar("yaml")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="grammar must be a text, got 'dict'"):
        Grammar("json_schema", {"type": "object"})  # type: ignore[arg-type]
    for field in ("spec", "structural_tag"):
        with pytest.raises(InvalidRequestError, match="text without lone surrogates") as caught:
            Grammar("regex", **{field: "a\ud83d"})
        assert caught.value.param == "grammar"


def test_with_valid_keeps_all_other_values() -> None:
    params = SamplingParams(stop=("a",), logit_bias={3: 1.0}, top_k=5, seed=3)
    changed = params.with_valid(seed=4, stop=())
    assert changed == SamplingParams(logit_bias={3: 1.0}, top_k=5, seed=4)
    assert params.seed == 3


def test_min_tokens_is_at_most_max_tokens() -> None:
    SamplingParams(max_tokens=5, min_tokens=5)
    SamplingParams(min_tokens=5)
    with pytest.raises(InvalidRequestError, match=r"min_tokens must be at most max_tokens \(5\)"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_accepts_several_completions_at_temperature_0() -> None:
    assert SamplingParams(n=2, temperature=0).n == 2


def test_is_greedy_and_has_penalties() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
    assert not SamplingParams().has_penalties
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{field: 0.5}).has_penalties


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 1e-6, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}),
        ({"temperature": 1e-4, "top_k": -1}, {"temperature": 0.01}),
        ({"temperature": 1e300, "top_p": 0.5}, {"temperature": 1e6, "top_p": 0.5}),
        ({"top_k": 5, "min_p": 0.1, "seed": 3}, {"top_k": 5, "min_p": 0.1, "seed": 3}),
        ({"repetition_penalty": 1e-300}, {"repetition_penalty": 1e-6}),
        ({"repetition_penalty": 1e300}, {"repetition_penalty": 1e6}),
    ],
)
def test_normalises_parameters(given: dict, expected: dict) -> None:
    normalised = SamplingParams(**given).normalised()
    assert normalised == SamplingParams(**expected)
    assert normalised.normalised() == normalised


def test_is_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_the_limit_of_stop_ids_holds_before_the_end_tokens_of_a_model_are_added() -> None:
    most = SamplingParams(stop_token_ids=(1,) * MAX_STOP_TOKEN_IDS)
    most.check_token_ids(100)
    more = most.with_valid(stop_token_ids=(*most.stop_token_ids, 2, 3))
    # The engine accepts them.
    wire = msgspec.msgpack.encode(more)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == more
    with pytest.raises(InvalidRequestError, match="at most 256 token IDs, got 258") as caught:
        more.check_token_ids(100)
    assert caught.value.param == "stop_token_ids"


def test_stop_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=(0, 99)).check_token_ids(100)
    for bad in (-1, 100):
        with pytest.raises(InvalidRequestError, match="out of vocabulary") as caught:
            SamplingParams(stop_token_ids=(0, bad)).check_token_ids(100)
        assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("logit_bias", lambda i: {"logit_bias": {3: 1.0, i: 2.0}}),
        ("allowed_token_ids", lambda i: {"allowed_token_ids": (3, i)}),
        ("bad_words", lambda i: {"bad_words_token_ids": ((1,), (2, i))}),
    ],
)
def test_every_field_of_token_ids_is_checked_against_the_vocabulary(param, fields) -> None:
    SamplingParams(**fields(99)).check_token_ids(100)
    for bad in (-1, 100, 2**31, 2**70):
        with pytest.raises(InvalidRequestError, match="out of vocabulary") as caught:
            SamplingParams(**fields(bad)).check_token_ids(100)
        assert caught.value.param == param


@pytest.mark.parametrize(
    "words", [((),), ((1,) * (MAX_BAD_WORD_TOKENS + 1),), ((1,),) * (MAX_BAD_WORDS + 1)]
)
def test_rejects_empty_long_and_too_many_bad_words(words) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words must be") as caught:
        SamplingParams(bad_words_token_ids=words)
    assert caught.value.param == "bad_words"


def test_rejects_a_long_grammar_and_a_grammar_with_allowed_token_ids() -> None:
    with pytest.raises(InvalidRequestError, match="grammar must be at most"):
        Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(InvalidRequestError, match="cannot be combined"):
        SamplingParams(grammar=Grammar("json_object"), allowed_token_ids=(1,))


@given(st.lists(st.integers(-(2**70), 2**70), max_size=20), st.integers(1, 2**20))
def test_check_ids_accepts_exactly_the_vocabulary(ids: list[int], vocab_size: int) -> None:
    if all(i in range(vocab_size) for i in ids):
        check_ids(ids, vocab_size, param="prompt")
    else:
        with pytest.raises(InvalidRequestError, match="prompt"):
            check_ids(ids, vocab_size, param="prompt")


def test_the_message_shortens_a_long_list_of_bad_ids() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_ids([10**9] * 100_000, 10, param="prompt")
    assert len(caught.value.message) < 300


def test_decodes_from_json_and_omits_defaults() -> None:
    wire = msgspec.json.encode({"temperature": 0.5, "stop": ["a"]})
    assert msgspec.json.decode(wire, type=SamplingParams) == SamplingParams(
        temperature=0.5, stop=("a",)
    )
    # Defaults are not sent.
    assert msgspec.json.encode(SamplingParams()) == b"{}"


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (b'{"n": 0}', "n"),
        (b'{"top_p": 0}', "top_p"),
        (b'{"seed": 9223372036854775808}', "seed"),
        (b'{"stop": [""]}', "stop"),
        (b'{"max_tokens": 5, "min_tokens": 6}', "min_tokens"),
    ],
)
def test_decoding_rejects_a_bad_value_and_names_its_field(wire: bytes, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        msgspec.json.decode(wire, type=SamplingParams)
    assert caught.value.param == field


@pytest.mark.parametrize("wire", [b'{"n": "1"}', b'{"top_p": null}', b'{"stop": "a"}', b"[]"])
def test_decoding_rejects_a_value_of_another_type(wire: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(wire, type=SamplingParams)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_within_logprobs_applies_the_limit_of_the_engine(field: str) -> None:
    def within(count: int, limit: int) -> int | None:
        params = SamplingParams(**{field: count}).within_logprobs(limit, vocab_size=300)
        return getattr(params, field)

    assert [within(count, 20) for count in (0, 7, 20)] == [0, 7, 20]
    assert [within(count, 300) for count in (-1, 299, 300)] == [300, 299, 300]
    assert [within(count, 1000) for count in (-1, 999)] == [300, 300]
    for count, limit in [(21, 20), (-1, 20), (-1, 299), (301, 300), (1, 0)]:
        with pytest.raises(
            InvalidRequestError, match=f"between 0 and {limit} .*--max-logprobs"
        ) as e:
            within(count, limit)
        assert e.value.param == field
        assert e.value.message.endswith(f"got {count}")
    plain = SamplingParams()
    assert plain.within_logprobs(0, 300) is plain
