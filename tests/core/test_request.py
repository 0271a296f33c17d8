import pytest

from jaxserve.core.request import Request
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import SamplingParams

EOS, STOP_ID, OTHER = 2, 7, 5


def make_request(prompt=(1, 1, 1), *, context_length=100, num_prior_tokens=0, **params):
    params = SamplingParams(**{"seed": 0, "stop_token_ids": (STOP_ID,), **params})
    submit = Submit("a", list(prompt), params, eos_token_id=EOS, num_prior_tokens=num_prior_tokens)
    return Request.from_submit(submit, order=0, context_length=context_length)


def appended(request, tokens):
    return [request.append(token) for token in tokens]


GO_ON = (None, None)
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
def test_how_a_request_ends(tokens, params, last):
    *before, end = appended(make_request(**params), tokens)
    assert before == [GO_ON] * len(before)
    assert end == last


def test_the_context_ends_a_request_even_below_min_tokens():
    request = make_request(context_length=5, min_tokens=50)
    assert appended(request, [EOS, EOS]) == [GO_ON, LENGTH]


def test_max_tokens_beyond_the_context_ends_with_the_context():
    assert make_request(context_length=5, max_tokens=50).max_num_tokens == 5


def test_without_an_end_token_no_token_is_one():
    submit = Submit("a", [1], SamplingParams(seed=0), eos_token_id=None)
    request = Request.from_submit(submit, order=0, context_length=10)
    assert appended(request, [EOS, 0]) == [GO_ON, GO_ON]


def test_tokens_of_an_engine_that_died_count_as_generated():
    request = make_request((1, 1, 1, 9, 9), num_prior_tokens=2, max_tokens=4, min_tokens=4)
    assert request.num_prompt_tokens == 3
    assert request.num_output_tokens == 2
    assert appended(request, [EOS, EOS]) == [GO_ON, EOS_STOP]
    request = make_request((1, 1, 1, 9, 9), num_prior_tokens=2, max_tokens=4)
    assert appended(request, [OTHER, OTHER]) == [GO_ON, LENGTH]


def test_the_prompt_of_the_message_is_not_changed():
    submit = Submit("a", [1, 2], SamplingParams(seed=0))
    Request.from_submit(submit, order=0, context_length=10).append(3)
    assert submit.prompt_token_ids == [1, 2]
