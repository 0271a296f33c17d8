"""POST /v1/embeddings: vectors of prompts, from the hidden states that the model's head sees."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.front.outputs import Delta
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.params import check_prompt_fields
from jaxserve.openai.prompts import completion_prompts, encode_cut
from jaxserve.sampling_params import SamplingParams


class EmbeddingRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of POST /v1/embeddings."""

    input: Any = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class Embedding(msgspec.Struct, gc=False):
    """The vector of one prompt: numbers, or base64 of float32 with the lowest byte first."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, gc=False):
    """The tokens of all prompts; both fields are the same."""

    prompt_tokens: int
    total_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Nothing is generated. Not in the reply."""
        return 0


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/embeddings: a vector for each prompt, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """A request that has passed every check. Nothing runs before ``deltas`` is iterated."""

    model: str
    deltas: AsyncGenerator[Delta, None]
    num_prompts: int
    num_prompt_tokens: int
    as_base64: bool
    normalize: bool


async def prepare(
    text_engine: TextEngine, request: EmbeddingRequest, *, request_id: str = ""
) -> EmbeddingJob:
    """Checks a request and encodes its prompts.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: it will not be served.
    """
    text_engine.check_model(request.model)
    check_prompt_fields(request.cache_salt, request.truncate_prompt_tokens)
    width = text_engine.engine.ready.hidden_size
    if request.dimensions is not None and request.dimensions != width:
        raise InvalidRequestError(
            f"dimensions must be {width}, which is what the model has, got {request.dimensions}",
            param="dimensions",
        )
    prompts = await encode_cut(
        text_engine,
        completion_prompts(request.input, param="input"),
        request.truncate_prompt_tokens,
        room=0,
        add_special_tokens=request.add_special_tokens is not False,
        param="input",
    )
    deltas = text_engine.generate_batch(
        prompts,
        SamplingParams(temperature=0, max_tokens=1, pooling=request.pooling or "last"),
        request_id=request_id,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        param="input",
        length_param="input",
    )
    return EmbeddingJob(
        model=request.model or text_engine.model_name,
        deltas=deltas,
        num_prompts=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        as_base64=request.encoding_format == "base64",
        normalize=request.normalize is not False,
    )


async def complete(job: EmbeddingJob) -> EmbeddingsReply:
    """Runs a job to its end. Closing the coroutine aborts it.

    Raises:
      RequestFailedError: a prompt was aborted from elsewhere.
    """
    vectors: dict[int, list[float] | str] = {}
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            if delta.embedding is None:
                raise RequestFailedError("the request was aborted")
            vector = _unit(delta.embedding) if job.normalize else delta.embedding
            vectors[delta.index] = _as_base64(vector) if job.as_base64 else vector
    return EmbeddingsReply(
        data=[Embedding(i, vectors[i]) for i in range(job.num_prompts)],
        model=job.model,
        usage=EmbeddingUsage(job.num_prompt_tokens, job.num_prompt_tokens),
    )


def _unit(vector: Sequence[float]) -> list[float]:
    """A vector of length 1 in the same direction; zeros stay zeros."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def _as_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
