"""Limits hold for products: what each completion of a request repeats."""

import pytest

from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.openai import completions, limits
from jaxserve.openai.protocol import CompletionRequest
from jaxserve.testing.openai_calls import ask, complete
from jaxserve.testing.scripted_text_engine import scripted_text_engine


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"stop_token_ids": [1, 2]}, "stop_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"logit_bias": {"1": 1}, "stop_token_ids": [2]}, "logit_bias"),
    ],
)
async def test_token_ids_in_parameters_count_for_each_completion(monkeypatch, fields, param):
    most = 8 if param == "bad_words" else 2  # a bad word may have four tokens in two forms
    monkeypatch.setattr(limits, "MAX_PARAMETER_IDS", 3 * most)
    for more in ({"n": 3}, {"prompt": ["hello"] * 3}):
        await complete(scripted_text_engine("hello"), fields | more)
    await ask(scripted_text_engine("hello"), fields | {"n": 3})
    text_engine = scripted_text_engine("hello")
    for call, more in ((complete, {"n": 2, "prompt": ["a", "b"]}), (ask, {"n": 4})):
        with pytest.raises(InvalidRequestError, match="times the 4 completions") as caught:
            await call(text_engine, fields | more)
        assert caught.value.param == param
    assert text_engine.engine.submitted == []
    assert text_engine.num_in_flight == 0


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
async def test_repeated_prompts_count_for_each_completion(monkeypatch, field):
    monkeypatch.setattr(limits, "MAX_REPEATED_IDS", 12)
    body = {"prompt": [[1, 2], [3, 4, 5, 6]], field: True}
    text_engine = scripted_text_engine("hello")
    await complete(text_engine, body | {"n": 2})
    with pytest.raises(InvalidRequestError, match="would repeat 18") as caught:
        await complete(text_engine, body | {"n": 3})
    assert caught.value.param == field
    assert text_engine.num_in_flight == 0


async def test_log_probabilities_of_prompts_count_for_each_completion(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PROMPT_SCORES", 18)
    text_engine = scripted_text_engine("hello")
    body = {"prompt": [1, 2, 3], "prompt_logprobs": 2}
    await complete(text_engine, body | {"n": 2})
    with pytest.raises(InvalidRequestError, match="would show 27") as caught:
        await complete(text_engine, body | {"n": 3})
    assert caught.value.param == "prompt_logprobs"
    echo = {"prompt": [1, 2, 3], "logprobs": 2, "n": 3}
    await complete(text_engine, echo)
    with pytest.raises(InvalidRequestError) as caught:
        await complete(text_engine, echo | {"echo": True})
    assert caught.value.param == "logprobs"


async def test_a_permit_is_taken_before_any_work(monkeypatch):
    text_engine = scripted_text_engine("hello", max_in_flight=3)
    monkeypatch.setattr(text_engine.model.tokenizer, "encode", None)
    monkeypatch.setattr(completions, "read_grammar", None)
    with text_engine.admit(2, 1), pytest.raises(QueueFullError):
        await completions.prepare(text_engine, CompletionRequest(prompt=["a", "b"]))
    assert text_engine.num_in_flight == 0
