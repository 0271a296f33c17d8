"""POST /v1/chat/completions: from the body to a job, from a job to the reply or its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from jaxserve.front.outputs import Delta
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.constraints import constrained
from jaxserve.openai.frames import framed
from jaxserve.openai.job import Job, new_id
from jaxserve.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.openai.messages import MessageBuilder, MessageForm
from jaxserve.openai.params import chat_params, check_fields, length_field
from jaxserve.openai.prompts import content_text, encode_prompts, render_prompt
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


async def prepare(text_engine: TextEngine, request: ChatRequest, *, request_id: str = "") -> Job:
    """Checks a request, renders its messages and encodes them.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: it will not be served.
    """
    text_engine.check_model(request.model)
    check_fields(request)
    params = chat_params(request, text_engine.defaults, text_engine.engine.ready)
    use = read_tools(request, text_engine)
    params = await constrained(text_engine, request, params, use)
    thinks_aloud = text_engine.reasoning_parser is not None and text_engine.hides_think_tags
    if use.definitions or thinks_aloud:  # the marks of some formats are special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    text = await render_prompt(text_engine, _with_effort(request), tools=use.definitions)
    params = framed(text_engine, params, use, text)
    # The template writes the special tokens itself.
    prompts = await encode_prompts(
        text_engine,
        [text],
        request,
        add_special_tokens=bool(request.add_special_tokens),
        param="messages",
    )
    form = MessageForm(
        _parsers(text_engine, params.n, use, text) if params.detokenize else (),
        call_id_maker(text_engine),
        parallel=use.parallel,
        with_reasoning=request.include_reasoning is not False,
    )
    deltas = text_engine.generate_batch(
        prompts,
        params,
        request_id=request_id,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        param="messages",
        length_param=length_field(request),
        parsers=form.parsers,
    )
    return Job.start(
        text_engine,
        request,
        params,
        job_id=new_id("chatcmpl", request_id),
        prompts=prompts,
        deltas=deltas,
        echo=_echo(request),
        form=form,
    )


def _with_effort(request: ChatRequest) -> ChatRequest:
    """How much to think is a matter of the template, for models that have it."""
    if request.reasoning_effort is None:
        return request
    extra = {**(request.chat_template_kwargs or {}), "reasoning_effort": request.reasoning_effort}
    return msgspec.structs.replace(request, chat_template_kwargs=extra)


def _parsers(
    text_engine: TextEngine, n: int, use: ToolUse, prompt: str
) -> tuple[MessageParser, ...]:
    parsers = (make_parser(text_engine, use, prompt) for _ in range(n))
    return tuple(parser for parser in parsers if parser is not None)


def _echo(request: ChatRequest) -> tuple[str, ...]:
    """The text that the answer goes on from."""
    last = request.messages[-1] if request.messages else {}
    if not request.echo or last.get("role") != "assistant":
        return ()
    return (content_text(last.get("content"), "messages"),)


async def complete(job: Job) -> ChatCompletion:
    """Runs a job to its end. Closing the coroutine aborts it."""
    choices = [
        ChatChoice(i, ChatMessage(""), ChatLogprobs([]) if job.num_logprobs is not None else None)
        for i in range(job.num_answers)
    ]
    messages = [MessageBuilder(*job.echo) for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    reply = ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=job.usage.usage(),
    )
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            choice = choices[delta.index]
            for piece in job.form.read(delta):
                messages[delta.index].add(piece)
            token_ids[delta.index] += delta.token_ids
            if choice.logprobs is not None and delta.logprobs:
                more = chat_logprobs(job.tokenizer, job.token_name, delta.logprobs)
                choice.logprobs.content += more.content
            if job.num_prompt_logprobs is not None and delta.prompt_logprobs is not None:
                reply.prompt_logprobs = prompt_logprobs(
                    job.tokenizer, delta.prompt_logprobs, job.num_prompt_logprobs
                )
            choice.finish_reason = job.form.finish_reason(delta)
            choice.stop_reason = delta.stop_reason
    for choice, message, ids in zip(choices, messages, token_ids, strict=True):
        choice.message = message.message()
        if job.with_token_ids:
            choice.token_ids = ids
    if job.with_token_ids:
        reply.prompt_token_ids = job.prompts[0]
    reply.usage = job.usage.usage()
    return reply


async def stream(job: Job) -> AsyncGenerator[ChatChunk, None]:
    """Runs a job and yields its chunks: for each answer the role, then pieces of the message."""
    started: set[int] = set()
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            if delta.index not in started:
                started.add(delta.index)
                yield _first_chunk(job, delta.index)
                for text in job.echo:
                    echoed = ChatChunkChoice(delta.index, ChatDelta(content=text))
                    yield _chunk(job, [echoed], job.continuous_usage)
            job.usage.add(delta)
            for choice in _pieces(job, delta):
                yield _chunk(job, [choice], job.continuous_usage)
    if job.include_usage:
        yield _chunk(job, [], True)


def _pieces(job: Job, delta: Delta) -> list[ChatChunkChoice]:
    """One choice for each piece; log probabilities are with the first, the end is with the last."""
    pieces = job.form.read(delta)
    if not pieces:
        if not delta.logprobs and delta.finish_reason is None and not job.with_token_ids:
            return []
        pieces = [ChatDelta()]
    choices = [ChatChunkChoice(delta.index, piece) for piece in pieces]
    if delta.logprobs:
        choices[0].logprobs = chat_logprobs(job.tokenizer, job.token_name, delta.logprobs)
    if job.with_token_ids:
        choices[0].token_ids = delta.token_ids
    choices[-1].finish_reason = job.form.finish_reason(delta)
    choices[-1].stop_reason = delta.stop_reason
    return choices


def _first_chunk(job: Job, index: int) -> ChatChunk:
    """Says who speaks, and what was asked if the ids of that are wanted."""
    role = ChatDelta(role="assistant", content="")
    chunk = _chunk(job, [ChatChunkChoice(index, role)], job.continuous_usage)
    if job.with_token_ids:
        chunk.prompt_token_ids = job.prompts[0]
    return chunk


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
