"""A request is checked and normalised once, into what the engine gets for each completion."""

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.front.requests import CompletionTask, GenerateRequest, resolve
from jaxserve.front.served_model import ServedModel
from jaxserve.sampling_params import TEMPERATURES, SamplingParams
from jaxserve.testing.scripted_engine import READY
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer


def tasks_of(prompts=((1, 2),), *, defaults=None, **fields) -> list[CompletionTask]:
    model = ServedModel.create(READY, tiny_tokenizer(), names=["tiny"], defaults=defaults)
    request = GenerateRequest(prompts=[list(prompt) for prompt in prompts], **fields)
    return resolve(request, model, arrival_s=1.5)


def test_a_greedy_completion_has_no_filters() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    (task,) = tasks_of(params=params)
    sent = task.submit.params
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0, 1.0, 0, 0.0)
    assert task.params.top_k == 3


def test_a_low_temperature_is_raised_and_top_k_minus_one_becomes_zero() -> None:
    params = SamplingParams(temperature=1e-4, top_p=0.5, top_k=-1)
    sent = tasks_of(params=params)[0].submit.params
    assert (sent.temperature, sent.top_p, sent.top_k) == (TEMPERATURES[0], 0.5, 0)


def test_filters_of_a_random_completion_are_sent() -> None:
    params = SamplingParams(temperature=0.7, top_k=9, min_p=0.2)
    sent = tasks_of(params=params)[0].submit.params
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.7, 1.0, 9, 0.2)


def test_each_completion_has_its_index_seed_and_id() -> None:
    tasks = tasks_of(((1,), (2, 3)), params=SamplingParams(n=3, seed=2**63 - 2), request_id="r")
    assert [task.index for task in tasks] == [0, 1, 2, 3, 4, 5]
    assert [task.submit.prompt_token_ids for task in tasks] == [[1]] * 3 + [[2, 3]] * 3
    seeds = [task.submit.params.seed for task in tasks]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)] * 2
    assert {task.submit.params.n for task in tasks} == {1}
    ids = [task.submit.request_id for task in tasks]
    assert len(set(ids)) == 6
    assert all(name.startswith("r-") for name in ids)


def test_completions_without_a_seed_get_different_seeds() -> None:
    tasks = [*tasks_of(params=SamplingParams(n=2)), *tasks_of(params=SamplingParams(n=2))]
    assert len({task.submit.params.seed for task in tasks}) == 4


def test_stop_strings_stay_in_the_front() -> None:
    (task,) = tasks_of(params=SamplingParams(stop=("x",)))
    assert task.submit.params.stop == ()
    assert task.params.stop == ("x",)


@pytest.mark.parametrize(
    ("requested", "default", "model_default", "expected"),
    [
        (5, 7, 9, 5),
        (None, 7, 9, 7),
        (None, None, 9, 9),
        (None, None, None, READY.max_model_len - 2),
    ],
)
def test_the_length_comes_from_the_request_or_a_default(
    requested, default, model_default, expected
):
    defaults = GenerationDefaults(max_tokens=model_default)
    params = SamplingParams(max_tokens=requested)
    (task,) = tasks_of(params=params, defaults=defaults, default_max_tokens=default)
    assert task.submit.params.max_tokens == expected


def test_an_error_names_the_field_of_the_api() -> None:
    with pytest.raises(InvalidRequestError, match=r"input\[1\]") as caught:
        tasks_of(((1,), (10**6,)), params=SamplingParams(), prompt_field="input")
    assert caught.value.param == "input"
