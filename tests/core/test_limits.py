import pytest

from jaxserve.core.limits import check_length, context_length
from jaxserve.errors import ContextLengthError, InvalidRequestError

SIZES = {"max_model_len": 32, "num_blocks": 100, "block_size": 16}


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
def test_longer_ones_are_refused_with_the_numbers(num_prompt_tokens, max_tokens, param, numbers):
    with pytest.raises(ContextLengthError) as caught:
        check_length(num_prompt_tokens, max_tokens, **SIZES)
    assert caught.value.param == param
    for number in numbers:
        assert f" {number} " in f" {caught.value.message} ".replace("(", " ").replace(",", " ")


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        check_length(0, 5, **SIZES)
    assert caught.value.param == "prompt"


def test_a_small_pool_is_the_limit_and_is_named():
    sizes = {"max_model_len": 1000, "num_blocks": 5, "block_size": 4}
    assert context_length(**sizes) == 16
    check_length(6, 10, **sizes)
    with pytest.raises(ContextLengthError, match="16 tokens .*4 blocks of 4"):
        check_length(7, 10, **sizes)
