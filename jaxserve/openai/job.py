"""An accepted request of any endpoint, and the count of its tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from msgspec import UNSET

from jaxserve.front.outputs import Delta
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.logprobs import TokenName, token_names
from jaxserve.openai.messages import PLAIN, MessageForm
from jaxserve.openai.protocol import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from jaxserve.sampling_params import ALL_LOGPROBS, SamplingParams
from jaxserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class UsageCount:
    """The tokens of a job so far."""

    num_prompt_tokens: int
    n: int
    num_completion_tokens: int = 0
    num_reasoning_tokens: int | None = None
    cached_by_prompt: dict[int, int] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Counts the tokens of a delta. Of the answers to one prompt the first tells the hits."""
        self.num_completion_tokens += len(delta.token_ids)
        if delta.events is not None:
            known = self.num_reasoning_tokens or 0
            self.num_reasoning_tokens = known + delta.num_reasoning_tokens
        if delta.index % self.n == 0:
            self.cached_by_prompt[delta.index] = delta.num_cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of the prompts were not computed again."""
        return sum(self.cached_by_prompt.values())

    def usage(self) -> Usage:
        """As the API says it."""
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
      echo: a text to put before the answers to each prompt, or empty.
      form: of the messages of a chat.
      num_logprobs: how many of the likeliest tokens to show with each token; None: no numbers.
      num_prompt_logprobs: likewise for the ``prompt_logprobs`` field.
      token_name: what log probabilities call a token.
      with_token_ids: show the ids of prompts and answers too.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    deltas: AsyncGenerator[Delta, None]
    prompts: list[list[int]]
    num_answers: int
    usage: UsageCount
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    token_name: TokenName
    with_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    echo: tuple[str, ...] = ()
    form: MessageForm = PLAIN

    @classmethod
    def start(
        cls,
        text_engine: TextEngine,
        request: GenerationRequest,
        params: SamplingParams,
        *,
        job_id: str,
        prompts: list[list[int]],
        deltas: AsyncGenerator[Delta, None],
        echo: tuple[str, ...] = (),
        form: MessageForm = PLAIN,
    ) -> Job:
        """The job of a request whose prompts have been encoded and accepted."""
        options = request.stream_options
        include_usage = bool(options and options.include_usage)
        as_ids = bool(request.return_tokens_as_token_ids)
        num_prompt_logprobs = request.prompt_logprobs
        if num_prompt_logprobs == ALL_LOGPROBS:
            num_prompt_logprobs = params.prompt_logprobs  # counted by now
        return cls(
            id=job_id,
            created=int(time.time()),
            model=request.model or text_engine.model_name,
            fingerprint=text_engine.fingerprint,
            tokenizer=text_engine.tokenizer,
            deltas=deltas,
            prompts=prompts,
            num_answers=len(prompts) * params.n,
            usage=UsageCount(sum(map(len, prompts)), params.n),
            num_logprobs=params.logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            token_name=token_names(text_engine.tokenizer, as_ids=as_ids),
            with_token_ids=bool(request.return_token_ids),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            echo=echo,
            form=form,
        )


def new_id(prefix: str, request_id: str = "") -> str:
    """The id of a reply: from the client's own request id if it gave one."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"
