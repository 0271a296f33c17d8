"""POST /v1/chat/completions: from the body to a job, from a job to the reply or its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from jaxserve.frontend import Frontend
from jaxserve.openai.job import Job, new_id
from jaxserve.openai.logprobs import chat_logprobs
from jaxserve.openai.params import chat_params, check_supported
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
)
from jaxserve.streams import Delta


async def prepare(frontend: Frontend, request: ChatRequest, *, request_id: str = "") -> Job:
    """Checks a request, renders its messages and encodes them.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: it will not be served.
    """
    frontend.check_model(request.model)
    check_supported(request)
    params = chat_params(request, frontend.defaults)
    if request.reasoning_effort is not None:  # a matter of the template, for models that have it
        extra = {
            **(request.chat_template_kwargs or {}),
            "reasoning_effort": request.reasoning_effort,
        }
        request = msgspec.structs.replace(request, chat_template_kwargs=extra)
    text = await render_prompt(frontend, request)
    # The template writes the special tokens itself.
    prompt = await frontend.encode(
        text, add_special_tokens=bool(request.add_special_tokens), param="messages"
    )
    deltas = frontend.generate_batch(
        [prompt],
        params,
        request_id=request_id,
        priority=request.priority or 0,
        param="messages",
    )
    return Job.start(
        frontend,
        request,
        request_id=new_id("chatcmpl", request_id),
        prompts=[prompt],
        deltas=deltas,
        has_logprobs=params.logprobs is not None,
    )


async def complete(job: Job) -> ChatCompletion:
    """Runs a job to its end. Closing the coroutine aborts it."""
    choices = [
        ChatChoice(i, ChatMessage(""), ChatLogprobs([]) if job.has_logprobs else None)
        for i in range(job.num_answers)
    ]
    texts: list[list[str]] = [[] for _ in choices]
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            choice = choices[delta.index]
            texts[delta.index].append(delta.text)
            if choice.logprobs is not None and delta.logprobs:
                choice.logprobs.content += chat_logprobs(job.tokenizer, delta.logprobs).content
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    for choice, text in zip(choices, texts, strict=True):
        choice.message.content = "".join(text)
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=job.usage.usage(),
    )


async def stream(job: Job) -> AsyncGenerator[ChatChunk, None]:
    """Runs a job and yields its chunks: for each answer the role, then pieces of text."""
    started: set[int] = set()
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            if delta.index not in started:
                started.add(delta.index)
                role = ChatDelta(role="assistant", content="")
                yield _chunk(job, [ChatChunkChoice(delta.index, role)], job.continuous_usage)
            job.usage.add(delta)
            choice = _piece(job, delta)
            if delta.text or choice.logprobs is not None or delta.finish_reason is not None:
                yield _chunk(job, [choice], job.continuous_usage)
    if job.include_usage:
        yield _chunk(job, [], True)


def _piece(job: Job, delta: Delta) -> ChatChunkChoice:
    return ChatChunkChoice(
        delta.index,
        ChatDelta(content=delta.text or None),
        chat_logprobs(job.tokenizer, delta.logprobs) if delta.logprobs else None,
        delta.finish_reason,
        delta.stop_reason,
    )


def _chunk(job: Job, choices: list[ChatChunkChoice], with_usage: bool) -> ChatChunk:
    return ChatChunk(
        id=job.id,
        object="chat.completion.chunk",
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=job.usage.usage() if with_usage else None,
    )
