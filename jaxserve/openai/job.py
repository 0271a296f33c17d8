"""An accepted request for text, whatever its endpoint, and the counts of its tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import UNSET

from jaxserve.front.outputs import Delta
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.chat_message import PLAIN, MessageForm
from jaxserve.openai.logprobs import TokenName, token_names
from jaxserve.openai.protocol import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from jaxserve.sampling_params import ALL_LOGPROBS, SamplingParams
from jaxserve.text.tokenizer import Tokenizer

T = TypeVar("T")

SCORES_AT_ONCE = 2000
"""About so many log probabilities are built before other tasks run. That takes 2 ms."""


@dataclass(slots=True)
class UsageCount:
    """Counts the tokens of a job.

    Attributes:
      num_prompt_tokens: tokens of all prompts.
      n: completions of each prompt.
      num_completion_tokens: tokens of all completions so far.
      num_reasoning_tokens: generated tokens in think blocks; None: completions are not parsed.
      num_scores: log probabilities in the deltas so far, roughly.
      cached_by_prompt: tokens from the prefix cache, by the index of a prompt's first completion.
    """

    num_prompt_tokens: int
    n: int
    num_completion_tokens: int = 0
    num_reasoning_tokens: int | None = None
    num_scores: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Counts a delta. Only the first completion of a prompt counts the cached tokens."""
        self.num_completion_tokens += len(delta.token_ids)
        if delta.events is not None:
            known = self.num_reasoning_tokens or 0
            self.num_reasoning_tokens = known + delta.num_reasoning_tokens
        if delta.index % self.n == 0:
            self.cached_by_prompt[delta.index] = delta.num_cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that came from the prefix cache."""
        return sum(self.cached_by_prompt.values())

    def usage(self) -> Usage:
        """Returns the counts in the form of the API."""
        return Usage(
            self.num_prompt_tokens,
            self.num_completion_tokens,
            self.num_prompt_tokens + self.num_completion_tokens,
            PromptTokensDetails(self.num_cached_tokens),
            UNSET
            if self.num_reasoning_tokens is None
            else CompletionTokensDetails(self.num_reasoning_tokens),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has passed every check. Nothing runs before ``deltas`` is iterated.

    Attributes:
      params: the sampling parameters of the request.
      usage: counts the tokens.
      num_logprobs: how many of the most likely tokens to show with each token; None: no numbers.
      num_prompt_logprobs: the same for each token of the prompt, in ``prompt_logprobs``.
      token_name: names a token in log probabilities.
      with_token_ids: show the IDs of prompts and completions too.
      include_usage: end a stream with a chunk that has the usage.
      continuous_usage: show the usage in every chunk of a stream.
      text_engine: runs the building of large parts of the reply.
      echo: for each prompt, the text to show before its completions; empty: none.
      form: turns deltas into the pieces of a chat message.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    deltas: AsyncGenerator[Delta, None]
    prompts: Sequence[list[int]]
    num_completions: int
    params: SamplingParams
    usage: UsageCount
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    token_name: TokenName
    with_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    text_engine: TextEngine
    echo: tuple[str, ...] = ()
    form: MessageForm = PLAIN

    @classmethod
    def of(
        cls,
        text_engine: TextEngine,
        body: GenerationRequest,
        request: GenerateRequest,
        deltas: AsyncGenerator[Delta, None],
        *,
        job_id: str,
        echo: tuple[str, ...] = (),
        form: MessageForm = PLAIN,
    ) -> Job:
        """Returns the job of an accepted request; iterating over ``deltas`` runs it."""
        model = text_engine.model
        options, params, prompts = body.stream_options, request.params, request.prompts
        include_usage = bool(options and options.include_usage)
        as_ids = bool(body.return_tokens_as_token_ids)
        num_prompt_logprobs = body.prompt_logprobs
        if num_prompt_logprobs == ALL_LOGPROBS:
            num_prompt_logprobs = params.prompt_logprobs  # there, a count replaces -1
        return cls(
            id=job_id,
            created=int(time.time()),
            model=body.model or model.name,
            fingerprint=model.fingerprint,
            tokenizer=model.tokenizer,
            deltas=deltas,
            prompts=prompts,
            num_completions=request.num_completions,
            params=params,
            usage=UsageCount(sum(map(len, prompts)), params.n),
            num_logprobs=params.logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            token_name=token_names(model.tokenizer, as_ids=as_ids),
            with_token_ids=bool(body.return_token_ids),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            text_engine=text_engine,
            echo=echo,
            form=form,
        )

    async def build(self, work: Callable[[Delta], T], delta: Delta) -> T:
        """Returns ``work(delta)``. A thread runs it if the delta has many log probabilities.

        Lets other tasks run now and then, even if all deltas have already arrived.
        """
        if delta.logprobs is None and delta.prompt_logprobs is None:
            return work(delta)
        num_scores = _num_scores(delta)
        before = self.usage.num_scores
        self.usage.num_scores += num_scores
        if before // SCORES_AT_ONCE < self.usage.num_scores // SCORES_AT_ONCE:
            await asyncio.sleep(0)
        return await self.text_engine.build(lambda: work(delta), size=num_scores)


def _num_scores(delta: Delta) -> int:
    """Returns how many log probabilities a delta has, roughly: all positions have equally many."""
    of_text, of_prompt = delta.logprobs or (), delta.prompt_logprobs or ()
    some = [entry for entry in (*of_text[:1], *of_prompt[1:2]) if entry is not None]
    return (len(of_text) + len(of_prompt)) * max([len(e.token_ids) for e in some], default=1)


def new_id(prefix: str, request_id: str = "") -> str:
    """Returns the ID of a reply, made from the client's request ID if there is one."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"
