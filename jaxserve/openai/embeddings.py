"""POST /v1/embeddings: a vector for each prompt, from the hidden states before the model's head."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError, UnavailableError
from jaxserve.front.admission import Permit
from jaxserve.front.outputs import Delta
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.text_engine import MEASURED_SIZE, TextEngine
from jaxserve.front.vectors import unit
from jaxserve.openai.encoding import as_json
from jaxserve.openai.params import check_prompt_fields
from jaxserve.openai.prompt_list import completion_prompts, num_prompts
from jaxserve.openai.prompts import encode_cut
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.json_size import size_of


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
    """The vector of one prompt: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, gc=False):
    """The tokens of all prompts; both fields are equal."""

    prompt_tokens: int
    total_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Always 0, and not part of the reply: nothing is generated."""
        return 0


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/embeddings: a vector for each prompt, in order."""

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
    text_engine: TextEngine, body: EmbeddingRequest, *, request_id: str = ""
) -> EmbeddingJob:
    """Checks a request, encodes its prompts and admits the request.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request will not be served.
    """
    model = text_engine.model
    model.check_name(body.model)
    check_prompt_fields(body.cache_salt, body.truncate_prompt_tokens)
    width = model.ready.hidden_size
    if body.dimensions is not None and body.dimensions != width:
        raise InvalidRequestError(
            f"dimensions must be {width}, the width of this model, got {body.dimensions}",
            param="dimensions",
        )
    with text_engine.admit(num_prompts(body.input, param="input"), 1, param="input") as permit:
        return await _prepare(text_engine, body, permit, request_id)


async def _prepare(
    text_engine: TextEngine, body: EmbeddingRequest, permit: Permit, request_id: str
) -> EmbeddingJob:
    """Does the work of `prepare` for a request that has been admitted."""
    model, size = text_engine.model, size_of(body, MEASURED_SIZE)
    prompts = await encode_cut(
        text_engine,
        await text_engine.build(lambda: completion_prompts(body.input, param="input"), size=size),
        body.truncate_prompt_tokens,
        room=0,
        add_special_tokens=body.add_special_tokens is not False,
        param="input",
    )
    request = GenerateRequest(
        prompts=prompts,
        params=SamplingParams(temperature=0, max_tokens=1, pooling=body.pooling or "last"),
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        prompt_field="input",
        length_field="input",
    )
    return EmbeddingJob(
        model=body.model or model.name,
        deltas=await text_engine.start(request, permit),
        num_prompts=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        as_base64=body.encoding_format == "base64",
        normalize=body.normalize is not False,
    )


async def complete(job: EmbeddingJob) -> EmbeddingsReply:
    """Runs a job to its end and returns the reply. Cancelling it aborts the request.

    Raises:
      UnavailableError: `POST /abort` or the shutdown of the server aborted the request.
    """
    vectors: dict[int, list[float] | str] = {}
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            if delta.embedding is None:
                raise UnavailableError("the request was aborted")
            vector = unit(delta.embedding) if job.normalize else list(delta.embedding)
            vectors[delta.index] = _as_base64(vector) if job.as_base64 else as_json(vector)
            await asyncio.sleep(0)  # other tasks run, even if all vectors have already arrived
    return EmbeddingsReply(
        data=[Embedding(i, vectors[i]) for i in range(job.num_prompts)],
        model=job.model,
        usage=EmbeddingUsage(job.num_prompt_tokens, job.num_prompt_tokens),
    )


def _as_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
