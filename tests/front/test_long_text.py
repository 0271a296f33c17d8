"""Long texts are refused after little work, and all others are encoded exactly."""

import pytest

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.front import long_text
from jaxserve.front.long_text import encode_within
from jaxserve.front.work_pool import Abandoned, Caller
from jaxserve.testing.scripted_text_engine import scripted_text_engine


@pytest.fixture
def model(monkeypatch):
    """A context of 256 tokens; parts have 256 characters."""
    monkeypatch.setattr(long_text, "MIN_PART_CHARS", 64)
    return scripted_text_engine("hello").model


def encoded_chars(monkeypatch, model) -> list[int]:
    """Returns a list that the length of every encoded text will be appended to."""
    lengths: list[int] = []
    encode = model.tokenizer.encode

    def counted(text, **options):
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(model.tokenizer, "encode", counted)
    return lengths


@pytest.mark.parametrize("text", ["", "hello", "hello world" * 100, "x" * 256, "é" * 99])
def test_texts_that_may_fit_are_encoded_as_a_whole(model, text) -> None:
    assert encode_within(model, text, 256, Caller()) == model.tokenizer.encode(text)


def test_a_text_whose_parts_have_few_tokens_is_encoded(model) -> None:
    text = "hello" * 250  # 250 tokens, 1250 characters
    assert len(encode_within(model, text, 256, Caller())) == 250


def test_a_text_that_no_tokens_could_cover_is_not_encoded(model, monkeypatch) -> None:
    lengths = encoded_chars(monkeypatch, model)
    with pytest.raises(ContextLengthError, match="maximum context length is 256"):
        encode_within(model, "x" * 100_000, 256, Caller())
    assert lengths == []


def test_a_text_with_too_many_tokens_is_refused_after_its_first_parts(model, monkeypatch) -> None:
    lengths = encoded_chars(monkeypatch, model)
    with pytest.raises(ContextLengthError, match=r"1500 characters, which are at least \d+"):
        encode_within(model, "7" * 1500, 256, Caller())
    assert sum(lengths) < 1500
    with pytest.raises(InvalidRequestError, match="at most 100 tokens, but this one has") as caught:
        encode_within(model, "7" * 450, 100, Caller())
    assert not isinstance(caught.value, ContextLengthError)


def test_work_ends_when_the_caller_leaves(model, monkeypatch) -> None:
    caller = Caller()
    encode = model.tokenizer.encode

    def leave(text, **options):
        caller.leave()
        return encode(text, **options)

    monkeypatch.setattr(model.tokenizer, "encode", leave)
    with pytest.raises(Abandoned):
        encode_within(model, "hello" * 250, 256, caller)
