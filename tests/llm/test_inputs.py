"""Prompts, conversations and parameters in the forms that people pass, and their errors."""

import array

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.llm.inputs import as_conversations, as_params, as_prompts, as_tools, as_variables
from jaxserve.sampling_params import SamplingParams

PROMPTS = [
    # (what is given, the prompts)
    ("hello", ["hello"]),
    ([], []),
    ([5, 6], [[5, 6]]),
    (range(3), [[0, 1, 2]]),
    (np.array([5, 6], np.uint16), [[5, 6]]),
    (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    (array.array("i", [5, 6]), [[5, 6]]),
    ([np.array([5, 6]), np.array([7])], [[5, 6], [7]]),
    ((text for text in ("a", "b")), ["a", "b"]),
    (iter([[5], "b"]), [[5], "b"]),
    ({"prompt": "hello"}, ["hello"]),
    ({"prompt": "hello", "prompt_token_ids": [5]}, [[5]]),
    ([{"prompt_token_ids": np.array([5, 6])}, {"prompt": "b"}], [[5, 6], "b"]),
    (np.array(["a", "b"]), ["a", "b"]),
    ([[]], [[]]),
]


@pytest.mark.parametrize(("given", "prompts"), PROMPTS)
def test_takes_prompts_in_all_forms(given, prompts) -> None:
    found = as_prompts(given)
    assert found == prompts
    for prompt in found:
        assert type(prompt) in (str, list)
        assert all(type(token_id) is int for token_id in prompt if isinstance(prompt, list))


BAD_PROMPTS = [
    (5, "prompts must be a prompt or a list of prompts, got int"),
    (None, "prompts must be a prompt or a list of prompts, got NoneType"),
    (b"hello", "prompts must be a prompt or a list of prompts, got bytes"),
    ([b"hello"], r"prompts\[0\] must be a string, a list of token IDs, .* got bytes"),
    ({"text": "x"}, "prompts must be a dict with the key 'prompt' .* got text"),
    ({}, "got no key"),
    ({"prompt": "x", "multi_modal_data": {}}, "got prompt, multi_modal_data"),
    ({"prompt": None}, "prompts must be a string"),
    ([1, "a"], "prompts must be a string, a list of token IDs"),
    ([1.5], r"prompts\[0\] must be a string, a list of token IDs, .* got float"),
    ([[1.5]], r"prompts\[0\] must be a string, a list of token IDs, .* got list"),
    (np.array([0.5]), r"prompts\[0\] must be a string"),
    (np.array(5), "prompts must be a prompt or a list of prompts, got ndarray"),
    (["a", None], r"prompts\[1\] must be a string, .* got NoneType"),
    ([[True]], r"prompts\[0\] must be a string"),
    ("\ud83d", "text without lone surrogates"),
]


@pytest.mark.parametrize(("given", "message"), BAD_PROMPTS)
def test_says_what_is_wrong_with_a_prompt(given, message) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        as_prompts(given)
    assert caught.value.param == "prompt"


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "conversations"),
    [
        ([USER], [[USER]]),
        ((USER, USER), [[USER, USER]]),
        ([[USER], (USER, USER)], [[USER], [USER, USER]]),
        (iter([[USER]]), [[USER]]),
        (({**USER} for _ in range(2)), [[USER, USER]]),
        ([], [[]]),
    ],
)
def test_takes_one_or_several_conversations(given, conversations) -> None:
    assert as_conversations(given) == conversations


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hi", "messages must be a list of messages or a list of such lists, got hi"),
        (USER, "messages must be a list of messages or a list of such lists, got dict"),
        (None, "got NoneType"),
        (["hi"], r"messages\[0\] must be a list of dicts with a role and a content, got hi"),
        ([USER, "hi"], "messages must be a list of dicts with a role and a content"),
        ([[USER], USER], r"messages\[1\] must be a list of dicts with a role and a content"),
    ],
)
def test_says_what_is_wrong_with_messages(given, message) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        as_conversations(given)
    assert caught.value.param == "messages"


def test_tools_are_dicts() -> None:
    assert as_tools(None) == []
    assert as_tools(iter([{"type": "function"}])) == [{"type": "function"}]
    for bad in ("clock", {"type": "function"}, [str], 5):
        with pytest.raises(InvalidRequestError, match="tools must be a list of dicts"):
            as_tools(bad)  # type: ignore[arg-type]


def test_variables_are_a_dict_with_names() -> None:
    assert as_variables(None) == {}
    assert as_variables({"mood": 1}) == {"mood": 1}
    for bad, got in ((["mood"], "a dict, got list"), ({1: 2}, "keys are strings, got int")):
        with pytest.raises(InvalidRequestError, match=got) as caught:
            as_variables(bad)  # type: ignore[arg-type]
        assert caught.value.param == "chat_template_kwargs"


DEFAULT = SamplingParams(temperature=0.5)
ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("given", "params"),
    [
        (None, [DEFAULT] * 2),
        (ONE, [ONE] * 2),
        ((ONE, DEFAULT), [ONE, DEFAULT]),
        (iter([DEFAULT, ONE]), [DEFAULT, ONE]),
    ],
)
def test_takes_one_object_or_one_for_each_prompt(given, params) -> None:
    assert as_params(given, 2, DEFAULT) == params


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 3}, "sampling_params must be SamplingParams, such as .* got dict"),
        ("greedy", "sampling_params must be SamplingParams, such as .* got greedy"),
        (5, "sampling_params must be SamplingParams, such as .* got int"),
        ([ONE, {"max_tokens": 3}], r"sampling_params\[1\] must be SamplingParams, .* got dict"),
        ([ONE], "one object or a list of 2, one for each prompt; got 1"),
        ([], "got 0"),
    ],
)
def test_says_what_is_wrong_with_parameters(given, message) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        as_params(given, 2, DEFAULT)
    assert caught.value.param == "sampling_params"
