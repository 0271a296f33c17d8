"""POST /v1/chat/completions: from the body to a job, from the job to the reply or its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import msgspec

from jaxserve.front.admission import Permit
from jaxserve.front.outputs import Delta
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import INLINE_SIZE, MEASURED_SIZE, TextEngine
from jaxserve.openai.chat_message import MessageBuilder, MessageForm
from jaxserve.openai.job import Job, new_id
from jaxserve.openai.limits import check_ids_in_flight, check_repeated_prompts
from jaxserve.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.openai.messages import message_text
from jaxserve.openai.params import (
    chat_params,
    check_fields,
    encode_bad_words,
    length_field,
    num_completions,
)
from jaxserve.openai.prompts import encode_prompts, render_prompt
from jaxserve.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatTokenLogprob,
    PromptLogprobs,
)
from jaxserve.openai.structured_output import read_grammar, with_structural_tag
from jaxserve.openai.tools import (
    ToolUse,
    call_id_maker,
    make_parser,
    read_tools,
    with_tools_text,
)
from jaxserve.parsing.parser import MessageParser
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.json_size import size_of


async def prepare(text_engine: TextEngine, body: ChatRequest, *, request_id: str = "") -> Job:
    """Checks a request, renders its messages, encodes them and admits the request.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request will not be served.
    """
    text_engine.model.check_name(body.model)
    check_fields(body)
    n = num_completions(body)
    with text_engine.admit(1, n, param="messages") as permit:
        check_ids_in_flight(body, n)
        return await prepare_admitted(text_engine, body, permit, request_id=request_id)


async def prepare_admitted(
    text_engine: TextEngine, body: ChatRequest, permit: Permit, *, request_id: str
) -> Job:
    """Does the work of `prepare` for a request that has been admitted."""
    model, size = text_engine.model, size_of(body, MEASURED_SIZE)
    use = await text_engine.build(lambda: read_tools(body, model), size=size)
    bad_words = await encode_bad_words(text_engine, body.bad_words)
    grammar = await read_grammar(text_engine, body, use, size=size)
    shown = await text_engine.build(
        lambda: with_tools_text(_with_effort(body), use, model), size=size
    )
    text = await render_prompt(text_engine, shown, tools=use.definitions)
    # The tags of some formats are special tokens, which the parser has to see.
    think_tags_are_special = model.reasoning_parser is not None and model.hides_think_tags
    params = await text_engine.build(
        lambda: chat_params(
            body,
            model,
            grammar=with_structural_tag(grammar, model, use, text),
            bad_words=bad_words,
            show_special_tokens=bool(use.definitions) or think_tags_are_special,
        ),
        # Joining a grammar with the formats of tools takes longer than the size of the body says.
        size=size if grammar is None else max(size, INLINE_SIZE + 1),
    )
    # The template writes the special tokens itself, so none are added unless the request asks.
    prompts = await encode_prompts(
        text_engine,
        [text],
        body,
        add_special_tokens=bool(body.add_special_tokens),
        param="messages",
    )
    check_repeated_prompts(body, prompts, params)
    form = MessageForm(
        _parsers(model, params, use, text),
        call_id_maker(model),
        parallel=use.parallel,
        with_reasoning=body.include_reasoning is not False,
    )
    request = GenerateRequest(
        prompts=prompts,
        params=params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        prompt_field="messages",
        length_field=length_field(body),
        parsers=form.parsers,
    )
    return Job.of(
        text_engine,
        body,
        request,
        await text_engine.start(request, permit),
        job_id=new_id("chatcmpl", request_id),
        echo=_echo(body),
        form=form,
    )


def _with_effort(request: ChatRequest) -> ChatRequest:
    """Makes reasoning_effort a variable of the template: some models read it there."""
    if request.reasoning_effort is None:
        return request
    extra = {**(request.chat_template_kwargs or {}), "reasoning_effort": request.reasoning_effort}
    return msgspec.structs.replace(request, chat_template_kwargs=extra)


def _parsers(
    model: ServedModel, params: SamplingParams, use: ToolUse, prompt: str
) -> tuple[MessageParser, ...]:
    """Returns a parser for each completion, or none if all text is content."""
    if not params.detokenize:
        return ()
    parsers = (make_parser(model, use, prompt) for _ in range(params.n))
    return tuple(parser for parser in parsers if parser is not None)


def _echo(request: ChatRequest) -> tuple[str, ...]:
    """Returns the text of the message that the completion continues, if the reply repeats it."""
    last = request.messages[-1] if request.messages else {}
    if not request.echo or last.get("role") != "assistant":
        return ()
    return (message_text(last, "messages"),)


async def complete(job: Job) -> ChatCompletion:
    """Runs a job to its end and returns the reply. Cancelling it aborts the request."""
    choices = [
        ChatChoice(i, ChatMessage(""), ChatLogprobs([]) if job.num_logprobs is not None else None)
        for i in range(job.num_completions)
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
            for piece in job.form.pieces(delta):
                messages[delta.index].add(piece)
            token_ids[delta.index] += delta.token_ids
            if choice.logprobs is not None and delta.logprobs:
                choice.logprobs.content += await job.build(_logprobs(job), delta)
            if job.num_prompt_logprobs is not None and delta.prompt_logprobs is not None:
                reply.prompt_logprobs = await job.build(_prompt_logprobs(job), delta)
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


def _logprobs(job: Job) -> Callable[[Delta], list[ChatTokenLogprob]]:
    return lambda delta: chat_logprobs(job.tokenizer, job.token_name, delta.logprobs or ()).content


def _prompt_logprobs(job: Job) -> Callable[[Delta], PromptLogprobs]:
    count = job.num_prompt_logprobs
    return lambda delta: prompt_logprobs(job.tokenizer, delta.prompt_logprobs or (), count or 0)


async def stream(job: Job) -> AsyncGenerator[ChatChunk, None]:
    """Runs a job and yields its chunks: the role of each completion, then pieces of its message."""
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
            for choice in await job.build(partial(_pieces, job), delta):
                yield _chunk(job, [choice], job.continuous_usage)
    if job.include_usage:
        yield _chunk(job, [], True)


def _pieces(job: Job, delta: Delta) -> list[ChatChunkChoice]:
    """Returns a choice for each piece of a delta.

    The first choice has the log probabilities and token IDs, the last has the finish reason.
    """
    pieces = job.form.pieces(delta)
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
    """Returns the chunk with the role, and with the IDs of the prompt if they were requested."""
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
