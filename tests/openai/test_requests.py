"""Fields of request bodies reach the engine as parameters, or as defaults of the model."""

from typing import Any

import msgspec

from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.openai_calls import ask, complete
from jaxserve.testing.scripted_text_engine import scripted_text_engine

NULLS = dict.fromkeys(
    [
        *msgspec.structs.asdict(CompletionRequest()),
        *msgspec.structs.asdict(ChatRequest()),
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls"),
    ]
)


async def test_null_means_absent() -> None:
    text_engine = scripted_text_engine("hello")
    body = {key: value for key, value in NULLS.items() if key not in ("prompt", "messages")}
    await complete(text_engine, {})
    await complete(text_engine, body)
    await ask(text_engine, {})
    await ask(text_engine, body)
    sent = [s.params for s in text_engine.engine.submitted]
    unseeded = [msgspec.structs.replace(params, seed=0) for params in sent]
    assert unseeded[0] == unseeded[1]
    assert unseeded[2] == unseeded[3]


async def test_accepts_values_without_effect_and_unknown_fields() -> None:
    text_engine = scripted_text_engine("hello")
    body = {
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "logit_bias": {},
        "suffix": "",
        "best_of": 1,
        "bad_words": [],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "return_token_ids": False,
        "stop": [],
        "reasoning_effort": "low",
        "no_such_field": {"deep": [1, {"er": None}]},
    }
    assert (await complete(text_engine, body)).choices[0].text == "hello"
    assert (await ask(text_engine, body)).choices[0].message.content == "hello"


async def test_fields_reach_the_engine() -> None:
    text_engine = scripted_text_engine("hello")
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 2**32 + 7,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop_token_ids": [4],
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "priority": -3,
        "logit_bias": {"7": 3, "8": -500},
        "cache_salt": "salt",
    }
    converted = ("priority", "stop_token_ids", "logit_bias", "cache_salt")
    expected = SamplingParams(
        **{k: v for k, v in body.items() if k not in converted},
        logit_bias={7: 3.0, 8: -500.0},
        stop_token_ids=(4,),
    )
    await complete(text_engine, body | {"logprobs": 2})
    await ask(text_engine, body | {"logprobs": True, "top_logprobs": 2})
    for submit in text_engine.engine.submitted:
        assert submit.params == msgspec.structs.replace(expected, logprobs=2)
        assert submit.priority == -3
        assert submit.cache_salt == "salt"


async def test_the_length_of_a_completion_has_limits_and_defaults() -> None:
    text_engine = scripted_text_engine("hello")
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (complete, {"prompt": [1] * 6}, 16),
        (complete, {"prompt": [1] * 250}, 6),
        (complete, {"max_tokens": 9}, 9),
        (complete, {"max_tokens": 4, "max_completion_tokens": 4}, 4),
        (ask, {"max_completion_tokens": 3}, 3),
        (ask, {"max_tokens": 9, "max_completion_tokens": 3}, 3),
        (ask, {"max_tokens": 9}, 9),
    ]
    for run, body, expected in cases:
        await run(text_engine, body)
        assert text_engine.engine.submitted[-1].params.max_tokens == expected
    await ask(text_engine, {})
    submit = text_engine.engine.submitted[-1]
    assert submit.params.max_tokens == 256 - len(submit.prompt_token_ids)


async def test_the_request_overrides_defaults_of_the_model() -> None:
    defaults = GenerationDefaults({"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.2}, 30)
    text_engine = scripted_text_engine("hello", defaults=defaults)
    await ask(text_engine, {})
    params = text_engine.engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.1, 1, 1.2)
    assert params.max_tokens == 30
    await ask(text_engine, {"temperature": 1.5, "top_k": -1, "max_tokens": 50})
    params = text_engine.engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (1.5, 0, 50)
