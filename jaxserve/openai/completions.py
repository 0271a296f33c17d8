"""POST /v1/completions: from the body to a job, from the job to the reply or its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from jaxserve.front.admission import Permit
from jaxserve.front.outputs import Delta
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import MEASURED_SIZE, TextEngine
from jaxserve.openai.job import Job, new_id
from jaxserve.openai.limits import check_ids_in_flight, check_repeated_prompts
from jaxserve.openai.logprobs import CompletionScores, extend, prompt_logprobs
from jaxserve.openai.params import (
    check_fields,
    completion_params,
    encode_bad_words,
    length_field,
    num_completions,
    requested_tokens,
)
from jaxserve.openai.prompt_list import Prompt, completion_prompts, num_prompts
from jaxserve.openai.prompts import encode_prompts
from jaxserve.openai.protocol import Completion, CompletionChoice, CompletionRequest
from jaxserve.openai.structured_output import read_grammar
from jaxserve.text.json_size import size_of

DEFAULT_MAX_TOKENS = 16
"""Length of a completion when the request names none, as in the OpenAI API."""


async def prepare(text_engine: TextEngine, body: CompletionRequest, *, request_id: str = "") -> Job:
    """Checks a request, encodes its prompts and admits the request.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request will not be served.
    """
    text_engine.model.check_name(body.model)
    check_fields(body)
    n = num_completions(body)
    num = num_prompts(body.prompt)
    with text_engine.admit(num, n) as permit:
        check_ids_in_flight(body, num * n)
        return await _prepare(text_engine, body, permit, request_id)


async def _prepare(
    text_engine: TextEngine, body: CompletionRequest, permit: Permit, request_id: str
) -> Job:
    """Does the work of `prepare` for a request that has been admitted."""
    model, size = text_engine.model, size_of(body, MEASURED_SIZE)
    bad_words = await encode_bad_words(text_engine, body.bad_words)
    grammar = await read_grammar(text_engine, body, size=size)
    params = await text_engine.build(
        lambda: completion_params(body, model, grammar=grammar, bad_words=bad_words), size=size
    )
    given = await text_engine.build(lambda: completion_prompts(body.prompt), size=size)
    adds_special = body.add_special_tokens is not False
    prompts = await encode_prompts(
        text_engine, given, body, add_special_tokens=adds_special, param="prompt"
    )
    check_repeated_prompts(body, prompts, params, echo=bool(body.echo))
    request = GenerateRequest(
        prompts=prompts,
        params=params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        length_field=length_field(body),
    )
    deltas = await text_engine.start(request, permit)
    if requested_tokens(body) == 0:
        deltas = _prompt_only(deltas)
    echo: tuple[str, ...] = ()
    if body.echo:
        is_cut = body.truncate_prompt_tokens is not None
        shown: list[Prompt] = list(prompts) if is_cut else given
        echo = await text_engine.build(
            lambda: tuple(_echo(model, prompt) for prompt in shown), size=sum(map(len, shown))
        )
    job_id = new_id("cmpl", request_id)
    return Job.of(text_engine, body, request, deltas, job_id=job_id, echo=echo)


def _echo(model: ServedModel, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt, skip_special_tokens=False)


async def _prompt_only(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Removes the generated token from every delta, but not the log probabilities of the prompt."""
    async with aclosing(deltas):
        async for delta in deltas:
            reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
            yield msgspec.structs.replace(
                delta, text="", token_ids=[], logprobs=[], finish_reason=reason, stop_reason=None
            )


async def complete(job: Job) -> Completion:
    """Runs a job to its end and returns the reply. Cancelling it aborts the request."""
    choices: list[CompletionChoice | None] = [None] * job.num_completions
    texts: list[list[str]] = [[] for _ in choices]
    pieces = _Pieces(job)
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            piece = await job.build(pieces.choice, delta)
            choice = choices[delta.index]
            texts[delta.index].append(piece.text)
            if choice is None:
                choices[delta.index] = piece
            else:
                _add(choice, piece)
    whole = [choice for choice in choices if choice is not None]
    assert len(whole) == len(choices), "a completion ended without a delta"
    for choice, text in zip(whole, texts, strict=True):
        choice.text = "".join(text)
    return _body(job, whole, with_usage=True)


def _add(choice: CompletionChoice, piece: CompletionChoice) -> None:
    """Adds the next piece of a completion, except its text, which `complete` joins at the end."""
    if choice.logprobs is not None and piece.logprobs is not None:
        extend(choice.logprobs, piece.logprobs)
    if isinstance(choice.token_ids, list) and isinstance(piece.token_ids, list):
        choice.token_ids += piece.token_ids
    choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason


async def stream(job: Job) -> AsyncGenerator[Completion, None]:
    """Runs a job and yields its chunks. Closing the generator aborts the request."""
    pieces = _Pieces(job)
    async with aclosing(job.deltas) as deltas:
        async for delta in deltas:
            job.usage.add(delta)
            choice = await job.build(pieces.choice, delta)
            has_scores = choice.logprobs is not None and choice.logprobs.tokens
            has_ids = job.with_token_ids and delta.token_ids
            if choice.text or choice.finish_reason is not None or has_scores or has_ids:
                yield _body(job, [choice], with_usage=job.continuous_usage)
    if job.include_usage:
        yield _body(job, [], with_usage=True)


class _Pieces:
    """Turns deltas into choices. The first choice of a completion also describes its prompt."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._started: set[int] = set()
        self._scores: list[CompletionScores] = []
        if job.num_logprobs is not None:
            self._scores = [
                CompletionScores(job.tokenizer, job.token_name, job.num_logprobs)
                for _ in range(job.num_completions)
            ]

    def choice(self, delta: Delta) -> CompletionChoice:
        choice = CompletionChoice(
            delta.index,
            delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if delta.index not in self._started:
            self._started.add(delta.index)
            self._begin(choice, delta)
        if self._scores and delta.logprobs is not None:
            scores = self._scores[delta.index].generated(delta.logprobs)
            if choice.logprobs is None:
                choice.logprobs = scores
            else:
                extend(choice.logprobs, scores)
        if self._job.with_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _begin(self, choice: CompletionChoice, delta: Delta) -> None:
        """Adds the echo, the log probabilities and the IDs of the prompt to a first choice."""
        job, of_prompt = self._job, delta.prompt_logprobs
        which = delta.index // job.usage.n
        prompt = job.prompts[which]
        if job.echo:
            choice.text = job.echo[which] + choice.text
            if self._scores and of_prompt is not None:
                scores = self._scores[delta.index]
                choice.logprobs = scores.prompt(prompt, of_prompt, job.echo[which])
        if job.with_token_ids:
            choice.prompt_token_ids = prompt
        if job.num_prompt_logprobs is not None and of_prompt is not None:
            choice.prompt_logprobs = prompt_logprobs(
                job.tokenizer, of_prompt, job.num_prompt_logprobs
            )


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
