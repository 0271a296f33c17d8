"""Parameters of declared stages in requests: ``vllm_xargs`` and `SamplingParams.extra_args`."""

import json
from typing import Any

import msgspec
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.parameters import Parameter
from jaxserve.openai import chat, completions, responses
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.scripted_engine import READY
from jaxserve.testing.scripted_text_engine import scripted_text_engine

PARAMETERS = (Parameter("factor", "float", 1.0, low=0.0), Parameter("ids", "token", [], most=2))
ENDPOINTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "completions": (completions, CompletionRequest, {"prompt": "hello"}),
    "chat": (chat, ChatRequest, {"messages": [{"role": "user", "content": "hello"}]}),
    "responses": (responses, ResponsesRequest, {"input": "hello"}),
}


@pytest.fixture
def text_engine() -> TextEngine:
    ready = msgspec.structs.replace(READY, parameters=PARAMETERS)
    return scripted_text_engine("hello", ready=ready)


async def send(text_engine: TextEngine, endpoint: str, arguments: Any) -> Any:
    adapter, body_type, body = ENDPOINTS[endpoint]
    data = json.dumps({**body, "vllm_xargs": arguments}).encode()
    await adapter.complete(await adapter.prepare(text_engine, decode(data, body_type)))
    (submit,) = text_engine.engine.submitted  # type: ignore[attr-defined]
    return submit.params.extra_args


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_sends_the_values_to_the_engine(text_engine, endpoint: str) -> None:
    found = await send(text_engine, endpoint, {"factor": 2, "ids": [5, 299]})
    assert found == {"factor": 2.0, "ids": [5, 299]}
    assert isinstance(found["factor"], float)


@pytest.mark.parametrize(
    "arguments",
    [None, {}, {"factor": None, "ids": None}, {"factor": 1}, {"factor": 1.0, "ids": []}],
)
async def test_no_values_are_none(text_engine, arguments: Any) -> None:
    assert await send(text_engine, "completions", arguments) is None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("arguments", "param", "message"),
    [
        ({"factor": -1}, "vllm_xargs.factor", r"must be a number of at least 0\.0, got -1"),
        ({"factor": "2"}, "vllm_xargs.factor", "got '2'"),
        ({"ids": [300]}, "vllm_xargs.ids", r"at most 2 token IDs between 0 and 299, got \[300\]"),
        ({"other": 1}, "vllm_xargs.other", "no stage .* expected one of factor, ids"),
        ([1], "vllm_xargs", "Expected object, got array"),
    ],
)
async def test_refuses_invalid_values(text_engine, endpoint, arguments, param, message) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await send(text_engine, endpoint, arguments)
    assert caught.value.param == param
    assert text_engine.engine.submitted == []


async def test_an_error_in_python_names_extra_args(text_engine) -> None:
    params = SamplingParams(extra_args={"factor": -1.0})
    with pytest.raises(InvalidRequestError, match=r"extra_args\.factor must be") as caught:
        text_engine.generate(GenerateRequest(prompts=[[1]], params=params))
    assert caught.value.param == "extra_args.factor"
