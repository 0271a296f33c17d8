"""Requests: finish reasons, tokens from a dead engine, and the limits of the context."""

import pytest

from jaxserve.core.request import Request, check_length
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import SamplingParams

EOS, STOP_ID, OTHER = 2, 7, 5


def make_request(prompt=(1, 1, 1), *, context_length=100, num_prior_tokens=0, **params):
    params = SamplingParams(**{"seed": 0, "stop_token_ids": (STOP_ID,), **params})
    submit = Submit("a", list(prompt), params, eos_token_id=EOS, num_prior_tokens=num_prior_tokens)
    return Request.from_submit(submit, order=0, context_length=context_length)


def append_all(request, tokens):
    return [request.append(token) for token in tokens]


RUNNING = (None, None)
EOS_STOP = (FinishReason.STOP, None)
ID_STOP = (FinishReason.STOP, STOP_ID)
LENGTH = (FinishReason.LENGTH, None)


@pytest.mark.parametrize(
    ("tokens", "params", "last"),
    [
        ([OTHER, EOS], {}, EOS_STOP),
        ([OTHER, STOP_ID], {}, ID_STOP),
        ([OTHER, OTHER, OTHER], {"max_tokens": 3}, LENGTH),
        ([OTHER, OTHER, EOS], {"max_tokens": 3}, EOS_STOP),
        ([OTHER, OTHER, STOP_ID], {"max_tokens": 3}, ID_STOP),
        ([EOS, STOP_ID, EOS], {"min_tokens": 3}, EOS_STOP),
        ([EOS, STOP_ID, STOP_ID], {"min_tokens": 3}, ID_STOP),
        ([EOS, EOS, OTHER], {"min_tokens": 3, "max_tokens": 3}, LENGTH),
        ([OTHER, EOS], {"stop_token_ids": (EOS,)}, EOS_STOP),
    ],
)
def test_finish_reason(tokens, params, last):
    *before, end = append_all(make_request(**params), tokens)
    assert before == [RUNNING] * len(before)
    assert end == last


def test_the_context_ends_a_request_even_below_min_tokens():
    request = make_request(context_length=5, min_tokens=50)
    assert append_all(request, [EOS, EOS]) == [RUNNING, LENGTH]


def test_max_tokens_is_limited_to_the_context():
    assert make_request(context_length=5, max_tokens=50).max_num_tokens == 5


def test_no_token_ends_a_request_without_an_eos_token():
    submit = Submit("a", [1], SamplingParams(seed=0), eos_token_id=None)
    request = Request.from_submit(submit, order=0, context_length=10)
    assert append_all(request, [EOS, 0]) == [RUNNING, RUNNING]


def test_tokens_from_a_dead_engine_count_as_output():
    request = make_request((1, 1, 1, 9, 9), num_prior_tokens=2, max_tokens=4, min_tokens=4)
    assert request.num_prompt_tokens == 3
    assert request.num_output_tokens == 2
    assert append_all(request, [EOS, EOS]) == [RUNNING, EOS_STOP]
    request = make_request((1, 1, 1, 9, 9), num_prior_tokens=2, max_tokens=4)
    assert append_all(request, [OTHER, OTHER]) == [RUNNING, LENGTH]


def test_append_does_not_change_the_prompt_of_the_message():
    submit = Submit("a", [1, 2], SamplingParams(seed=0))
    Request.from_submit(submit, order=0, context_length=10).append(3)
    assert submit.prompt_token_ids == [1, 2]


SIZES = {"max_model_len": 32}


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"), [(31, None), (31, 1), (1, 31), (32, 0)]
)
def test_a_request_may_fill_the_context(num_prompt_tokens, max_tokens):
    check_length(num_prompt_tokens, max_tokens, **SIZES)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param", "numbers"),
    [
        (40, None, "prompt", ["32", "40"]),
        (40, 5, "prompt", ["32", "40"]),
        (32, None, "prompt", ["32", "31"]),
        (33, 0, "prompt", ["32", "33"]),
        (8, 30, "max_tokens", ["32", "38", "8", "30", "24"]),
        (1, 32, "max_tokens", ["32", "33"]),
    ],
)
def test_rejects_a_longer_request_and_names_the_numbers(
    num_prompt_tokens, max_tokens, param, numbers
):
    with pytest.raises(ContextLengthError) as caught:
        check_length(num_prompt_tokens, max_tokens, **SIZES)
    assert caught.value.param == param
    for number in numbers:
        assert f" {number} " in f" {caught.value.message} ".replace("(", " ").replace(",", " ")


def test_rejects_an_empty_prompt():
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        check_length(0, 5, **SIZES)
    assert caught.value.param == "prompt"
