"""POST /v1/completions: from the body to a job, from a job to the reply or its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxserve.errors import InvalidRequestError
from jaxserve.frontend import Frontend
from jaxserve.openai.job import Job, new_id
from jaxserve.openai.logprobs import completion_logprobs
from jaxserve.openai.params import check_supported, completion_params
from jaxserve.openai.prompts import Prompt, completion_prompts
from jaxserve.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from jaxserve.streams import Delta

DEFAULT_MAX_TOKENS = 16


async def prepare(frontend: Frontend, request: CompletionRequest, *, request_id: str = "") -> Job:
    """Checks a request and encodes its prompts.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: it will not be served.
    """
    frontend.check_model(request.model)
    check_supported(request)
    params = completion_params(request, frontend.defaults)
    if request.echo and params.logprobs is not None:
        raise InvalidRequestError("echo with logprobs is not supported yet", param="echo")
    given = completion_prompts(request.prompt)
    adds_special = request.add_special_tokens is not False
    prompts = await _encode(frontend, given, add_special_tokens=adds_special)
    deltas = frontend.generate_batch(
        prompts,
        params,
        request_id=request_id,
        priority=request.priority or 0,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    return Job.start(
        frontend,
        request,
        request_id=new_id("cmpl", request_id),
        prompts=prompts,
        deltas=deltas,
        has_logprobs=params.logprobs is not None,
        echo=tuple(_echo(frontend, prompt) for prompt in given) if request.echo else (),
    )


async def _encode(
    frontend: Frontend, prompts: list[Prompt], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of prompts that are all texts or all ids already."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return await frontend.encode_batch(texts, add_special_tokens=add_special_tokens)
    return [prompt for prompt in prompts if not isinstance(prompt, str)]


def _echo(frontend: Frontend, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return frontend.tokenizer.decode(prompt, skip_special_tokens=False)


async def complete(job: Job) -> Completion:
    """Runs a job to its end. Closing the coroutine aborts it."""
    choices = [
        CompletionChoice(i, "", CompletionLogprobs([], [], [], []) if job.has_logprobs else None)
        for i in range(job.num_answers)
    ]
    texts: list[list[str]] = [[_echoed(job, i)] for i in range(job.num_answers)]
    pieces = _Pieces(job)
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            piece, choice = pieces.choice(delta), choices[delta.index]
            texts[delta.index].append(piece.text)
            if choice.logprobs is not None and piece.logprobs is not None:
                for field in CompletionLogprobs.__struct_fields__:
                    getattr(choice.logprobs, field).extend(getattr(piece.logprobs, field))
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
    for choice, text in zip(choices, texts, strict=True):
        choice.text = "".join(text)
    return _body(job, choices, with_usage=True)


async def stream(job: Job) -> AsyncGenerator[Completion, None]:
    """Runs a job and yields its chunks. Closing the generator aborts it."""
    pieces = _Pieces(job)
    started: set[int] = set()
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            choice = pieces.choice(delta)
            if job.echo and delta.index not in started:
                started.add(delta.index)
                choice.text = _echoed(job, delta.index) + choice.text
            if choice.text or choice.logprobs is not None or choice.finish_reason is not None:
                yield _body(job, [choice], with_usage=job.continuous_usage)
    if job.include_usage:
        yield _body(job, [], with_usage=True)


class _Pieces:
    """Turns deltas into choices; knows how long the token strings of each answer are so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._offsets = [0] * job.num_answers

    def choice(self, delta: Delta) -> CompletionChoice:
        logprobs = None
        if delta.logprobs:
            offset = self._offsets[delta.index]
            logprobs = completion_logprobs(self._job.tokenizer, delta.logprobs, offset=offset)
            self._offsets[delta.index] += sum(map(len, logprobs.tokens))
        return CompletionChoice(
            delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason
        )


def _echoed(job: Job, index: int) -> str:
    return job.echo[index // job.usage.n] if job.echo else ""


def _body(job: Job, choices: list[CompletionChoice], *, with_usage: bool) -> Completion:
    return Completion(
        id=job.id,
        object="text_completion",
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=job.usage.usage() if with_usage else None,
    )
