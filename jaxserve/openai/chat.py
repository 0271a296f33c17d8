"""POST /v1/chat/completions: from the body to a job, from a job to the reply or its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from jaxserve.frontend import Frontend
from jaxserve.openai.job import Job, new_id
from jaxserve.openai.logprobs import chat_logprobs
from jaxserve.openai.messages import MessageBuilder, MessageForm
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
from jaxserve.openai.tools import ToolUse, call_id_maker, make_parser, read_tools
from jaxserve.parsing.message_parser import MessageParser
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
    use = read_tools(request, frontend)
    text = await render_prompt(frontend, request, tools=use.definitions)
    form = MessageForm(
        _parsers(frontend, use, text, params.n),
        call_id_maker(frontend),
        parallel=use.parallel,
        with_reasoning=request.include_reasoning is not False,
    )
    if use.definitions:  # the marks of some formats are special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
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
        parsers=form.parsers,
    )
    return Job.start(
        frontend,
        request,
        request_id=new_id("chatcmpl", request_id),
        prompts=[prompt],
        deltas=deltas,
        has_logprobs=params.logprobs is not None,
        form=form,
    )


def _parsers(frontend: Frontend, use: ToolUse, prompt: str, n: int) -> tuple[MessageParser, ...]:
    parsers = (make_parser(frontend, use, prompt) for _ in range(n))
    return tuple(parser for parser in parsers if parser is not None)


async def complete(job: Job) -> ChatCompletion:
    """Runs a job to its end. Closing the coroutine aborts it."""
    choices = [
        ChatChoice(i, ChatMessage(""), ChatLogprobs([]) if job.has_logprobs else None)
        for i in range(job.num_answers)
    ]
    messages = [MessageBuilder() for _ in choices]
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            choice = choices[delta.index]
            for piece in job.form.read(delta):
                messages[delta.index].add(piece)
            if choice.logprobs is not None and delta.logprobs:
                choice.logprobs.content += chat_logprobs(job.tokenizer, delta.logprobs).content
            choice.finish_reason = job.form.finish_reason(delta)
            choice.stop_reason = delta.stop_reason
    for choice, message in zip(choices, messages, strict=True):
        choice.message = message.message()
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=job.usage.usage(),
    )


async def stream(job: Job) -> AsyncGenerator[ChatChunk, None]:
    """Runs a job and yields its chunks: for each answer the role, then pieces of the message."""
    started: set[int] = set()
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            if delta.index not in started:
                started.add(delta.index)
                role = ChatDelta(role="assistant", content="")
                yield _chunk(job, [ChatChunkChoice(delta.index, role)], job.continuous_usage)
            job.usage.add(delta)
            for choice in _pieces(job, delta):
                yield _chunk(job, [choice], job.continuous_usage)
    if job.include_usage:
        yield _chunk(job, [], True)


def _pieces(job: Job, delta: Delta) -> list[ChatChunkChoice]:
    """One choice for each piece; log probabilities are with the first, the end is with the last."""
    pieces = job.form.read(delta)
    if not pieces:
        if not delta.logprobs and delta.finish_reason is None:
            return []
        pieces = [ChatDelta()]
    choices = [ChatChunkChoice(delta.index, piece) for piece in pieces]
    if delta.logprobs:
        choices[0].logprobs = chat_logprobs(job.tokenizer, delta.logprobs)
    choices[-1].finish_reason = job.form.finish_reason(delta)
    choices[-1].stop_reason = delta.stop_reason
    return choices


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
