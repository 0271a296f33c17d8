"""The limits on log probabilities in a request, and the numbers that replies can hold."""

import json
import math
from typing import Any

import msgspec
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import chat, completions, responses
from jaxserve.openai.decoding import decode
from jaxserve.openai.logprobs import finite
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.scripted_engine import READY
from jaxserve.testing.scripted_text_engine import scripted_text_engine

VOCAB = READY.vocab_size


def text_engine(max_logprobs: int) -> TextEngine:
    ready = msgspec.structs.replace(READY, max_logprobs=max_logprobs)
    return scripted_text_engine([33, 34], ready=ready)


async def complete(text_engine: TextEngine, **body: Any) -> dict[str, Any]:
    request = decode(json.dumps({"prompt": "hello", **body}).encode(), CompletionRequest)
    reply = await completions.complete(await completions.prepare(text_engine, request))
    return json.loads(msgspec.json.encode(reply))["choices"][0]


async def ask(text_engine: TextEngine, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    request = decode(json.dumps({"messages": messages, **body}).encode(), ChatRequest)
    reply = await chat.complete(await chat.prepare(text_engine, request))
    return json.loads(msgspec.json.encode(reply))["choices"][0]


@pytest.mark.parametrize("limit", [0, 3, 60])
async def test_accepts_the_limit_and_rejects_more(limit: int) -> None:
    server = text_engine(limit)
    body = {"logprobs": limit, "prompt_logprobs": limit, "echo": True}
    assert (await complete(server, **body))["logprobs"] is not None
    entries = (await ask(server, logprobs=True, top_logprobs=limit))["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {limit}
    for too_many in (limit + 1, -1, 10**6):
        for make, field, more in [
            (complete, "logprobs", {}),
            (complete, "logprobs", {"echo": True}),
            (complete, "prompt_logprobs", {}),
            (ask, "top_logprobs", {"logprobs": True}),
            (ask, "prompt_logprobs", {}),
        ]:
            with pytest.raises(InvalidRequestError) as caught:
                await make(server, **{field: too_many, **more})
            assert caught.value.param == field
            assert caught.value.message.startswith(f"{field} must be between 0 and {limit} ")
            assert "--max-logprobs" in caught.value.message


async def test_errors_of_responses_name_their_own_field() -> None:
    request = decode(b'{"input": "hello", "top_logprobs": 4}', ResponsesRequest)
    with pytest.raises(
        InvalidRequestError, match="top_logprobs must be between 0 and 3 "
    ) as caught:
        await responses.prepare(text_engine(3), request)
    assert caught.value.param == "top_logprobs"


async def test_direct_requests_to_the_text_engine_have_the_same_limit() -> None:
    server = text_engine(3)
    with pytest.raises(InvalidRequestError, match="--max-logprobs"):
        server.generate(GenerateRequest(prompts=[[1, 2]], params=SamplingParams(logprobs=4)))


async def test_minus_one_means_the_whole_vocabulary() -> None:
    server = text_engine(VOCAB)
    choice = await complete(server, logprobs=-1, return_tokens_as_token_ids=True)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {VOCAB}
    choice = await complete(server, prompt=[5, 6, 7], prompt_logprobs=-1)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert {len(entry) for entry in others} == {VOCAB}
    choice = await ask(server, logprobs=True, top_logprobs=-1)
    assert {len(e["top_logprobs"]) for e in choice["logprobs"]["content"]} == {VOCAB}
    # An echoed prompt is scored with the larger of both counts; each field shows its own.
    await complete(server, logprobs=2, prompt_logprobs=-1, echo=True)
    assert server.engine.submitted[-1].params.prompt_logprobs == VOCAB  # type: ignore[attr-defined]
    requested = [submit.params.logprobs for submit in server.engine.submitted]  # type: ignore[attr-defined]
    assert requested == [VOCAB, None, VOCAB, 2]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-0.5, -0.5), (12000.0, 12000.0), (-9999.5, -9999.0), (-math.inf, -9999.0),
     (math.inf, 9999.0), (math.nan, -9999.0)],
)  # fmt: skip
def test_values_that_json_cannot_hold_are_clipped(value: float, shown: float) -> None:
    assert finite(value) == shown
