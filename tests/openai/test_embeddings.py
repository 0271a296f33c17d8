"""Bodies of /v1/embeddings become vectors of the prompts, or an error that names the field."""

import asyncio
import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.errors import (
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    UnknownModelError,
)
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import embeddings
from jaxserve.openai.decoding import decode
from jaxserve.openai.embeddings import EmbeddingRequest
from jaxserve.openai.errors import error_reply
from jaxserve.testing.scripted_engine import embedding_of
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.waiting import until

IDS = [5, 6, 7]
CONTEXT_LENGTH = 256


@pytest.fixture
def text_engine() -> TextEngine:
    return scripted_text_engine("never said")


async def embed(text_engine: TextEngine, input: Any, **body: Any) -> dict[str, Any]:
    request = decode(json.dumps({"input": input, **body}).encode(), EmbeddingRequest)
    reply = await embeddings.complete(await embeddings.prepare(text_engine, request))
    return json.loads(msgspec.json.encode(reply))


def normalised(vector: list[float]) -> np.ndarray:
    return np.array(vector) / np.linalg.norm(vector)


async def test_the_reply_has_a_vector_and_the_usage(text_engine) -> None:
    reply = await embed(text_engine, IDS, user="me", dimensions=4)
    (data,) = reply.pop("data")
    vector = data.pop("embedding")
    np.testing.assert_allclose(vector, normalised(embedding_of(IDS, "last")), rtol=1e-12)
    assert data == {"object": "embedding", "index": 0}
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    assert reply == {"object": "list", "model": "tiny", "usage": usage}


async def test_accepts_every_form_of_input(text_engine) -> None:
    texts = ["hello", "hello world"]
    ids = [text_engine.model.tokenizer.encode(text) for text in texts]
    expected = [normalised(embedding_of(prompt, "last")) for prompt in ids]
    for prompts in (texts, ids):
        reply = await embed(text_engine, prompts)
        assert [data["index"] for data in reply["data"]] == [0, 1]
        vectors = [data["embedding"] for data in reply["data"]]
        np.testing.assert_allclose(vectors, expected, rtol=1e-12)
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    for prompt in (texts[1], ids[1]):
        reply = await embed(text_engine, prompt)
        np.testing.assert_allclose(reply["data"][0]["embedding"], expected[1], rtol=1e-12)


async def test_vectors_are_in_the_order_of_the_prompts(text_engine) -> None:
    engine, second_came, arrived = text_engine.engine, asyncio.Event(), []
    generate = engine.generate

    async def generate_in_reverse(submit, *, on_ended=None):
        async for output in generate(submit, on_ended=on_ended):
            if submit.prompt_token_ids == [1]:
                await second_came.wait()
            arrived.append(submit.prompt_token_ids)
            second_came.set()
            yield output

    engine.generate = generate_in_reverse
    async with asyncio.timeout(60):
        reply = await embed(text_engine, [[1], [2, 2]], normalize=False)
    assert arrived == [[2, 2], [1]]
    assert [data["embedding"][2] for data in reply["data"]] == [1.0, 2.0]


async def test_pooling_normalisation_and_encoding_change_the_vector(text_engine) -> None:
    (data,) = (await embed(text_engine, IDS, pooling="mean", normalize=False))["data"]
    assert data["embedding"] == embedding_of(IDS, "mean")
    (data,) = (await embed(text_engine, IDS, encoding_format="base64"))["data"]
    vector = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
    np.testing.assert_allclose(vector, normalised(embedding_of(IDS, "last")), rtol=1e-6)


async def test_null_means_the_default(text_engine) -> None:
    names = msgspec.structs.fields(EmbeddingRequest)
    nulls = {field.name: None for field in names if field.name != "input"}
    assert await embed(text_engine, IDS, **nulls) == await embed(text_engine, IDS)


async def test_prompt_fields_reach_the_engine(text_engine) -> None:
    await embed(text_engine, IDS, truncate_prompt_tokens=2, priority=3, cache_salt="mine")
    await embed(text_engine, list(range(290)), truncate_prompt_tokens=-1)
    await embed(text_engine, "hello", add_special_tokens=False)
    cut, fitting, plain = text_engine.engine.submitted
    assert (cut.prompt_token_ids, cut.priority, cut.cache_salt) == (IDS[1:], 3, "mine")
    assert fitting.prompt_token_ids == list(range(290))[-CONTEXT_LENGTH:]
    expected = text_engine.model.tokenizer.encode("hello", add_special_tokens=False)
    assert plain.prompt_token_ids == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"input": bad}, "input") for bad in (None, 5, True, {}, [], [[]], [None], [IDS, []])),
        *(({"input": bad}, "input") for bad in ([1, "a"], ["a", 1], [[1], "a"], [-1], [300])),
        ({"input": [[1], [300]]}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": [[1]] * 1025}, "input"),
        ({"dimensions": 3}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "4"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 999}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_errors_name_the_field(text_engine, body, param) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await embed(text_engine, **{"input": IDS} | body)
    assert caught.value.param == param
    assert text_engine.engine.submitted == []


async def test_rejects_long_prompts_unknown_models_and_a_full_queue(text_engine) -> None:
    await embed(text_engine, [1] * CONTEXT_LENGTH)
    for prompt in ([1] * (CONTEXT_LENGTH + 1), "hello " * 3000):
        with pytest.raises(ContextLengthError) as caught:
            await embed(text_engine, prompt)
        assert caught.value.param == "input"
    with pytest.raises(UnknownModelError):
        await embed(text_engine, IDS, model="other")
    text_engine.admission.limit = 2
    held = text_engine.admission.admit(1)
    with pytest.raises(QueueFullError):
        await embed(text_engine, [IDS, IDS])
    held.release()
    await embed(text_engine, [IDS, IDS])


async def test_metrics_count_prompts_and_no_generated_tokens(text_engine) -> None:
    await embed(text_engine, [IDS, [1] * 100])
    metrics = text_engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (103, 0)
    assert dict(metrics.finished) == {"stop": 2}
    assert sum(metrics.time_to_first_token.counts) == 2
    assert sum(metrics.inter_token_latency.counts) == 0
    counts = {name: sum(histogram.counts) for name, histogram in metrics.by_request.items()}
    assert counts.pop("request_params_max_tokens") == 0
    assert set(counts.values()) == {2}
    assert metrics.by_request["request_prompt_tokens"].sum == 103
    assert metrics.by_request["request_prefill_kv_computed_tokens"].sum == 103
    assert metrics.by_request["request_generation_tokens"].sum == 0
    assert metrics.by_request["request_decode_time_seconds"].sum == 0
    for name in ("request_queue_time_seconds", "request_inference_time_seconds"):
        assert 0 <= metrics.by_request[name].sum < 60


async def test_aborted_prompts_are_not_counted_as_computed(text_engine) -> None:
    text_engine.engine.stall_after = 0
    task = asyncio.create_task(embed(text_engine, IDS))
    await until(lambda: text_engine.engine.submitted)
    text_engine.abort(None)
    with pytest.raises(UnavailableError):
        await task
    assert text_engine.metrics.prompt_tokens == 0
    assert dict(text_engine.metrics.finished) == {"abort": 1}
    assert sum(text_engine.metrics.time_to_first_token.counts) == 0


async def test_an_aborted_request_raises_an_error(text_engine) -> None:
    text_engine.engine.stall_after = 0
    task = asyncio.create_task(embed(text_engine, [IDS, IDS]))
    await until(lambda: len(text_engine.engine.submitted) == 2)
    assert text_engine.abort(None) == 2
    with pytest.raises(UnavailableError, match="aborted") as error:
        await task
    assert error_reply(error.value).status == 503
    assert text_engine.num_in_flight == 0


async def test_cancelling_the_caller_aborts_the_request(text_engine) -> None:
    text_engine.engine.stall_after = 0
    task = asyncio.create_task(embed(text_engine, [IDS, IDS]))
    await until(lambda: len(text_engine.engine.submitted) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(text_engine.engine.aborted) == 2
    assert text_engine.num_in_flight == 0
