"""An accepted request of either endpoint, and the count of its tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from jaxserve.frontend import Frontend
from jaxserve.openai.messages import PLAIN, MessageForm
from jaxserve.openai.protocol import GenerationRequest, PromptTokensDetails, Usage
from jaxserve.streams import Delta
from jaxserve.tokenizer import Tokenizer


@dataclass(slots=True)
class UsageCount:
    """The tokens of a job so far."""

    num_prompt_tokens: int
    n: int
    num_completion_tokens: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Counts the tokens of a delta. Of the answers to one prompt the first tells the hits."""
        self.num_completion_tokens += len(delta.token_ids)
        if delta.index % self.n == 0:
            self.cached_by_prompt[delta.index] = delta.num_cached_tokens

    def usage(self) -> Usage:
        """As the API says it."""
        return Usage(
            self.num_prompt_tokens,
            self.num_completion_tokens,
            self.num_prompt_tokens + self.num_completion_tokens,
            PromptTokensDetails(sum(self.cached_by_prompt.values())),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has passed every check. Nothing runs before ``deltas`` is iterated.

    ``echo`` has a text to put before the answers to each prompt, or is empty. ``form`` is that of
    the messages of a chat.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    deltas: AsyncGenerator[Delta, None]
    num_answers: int
    usage: UsageCount
    has_logprobs: bool
    include_usage: bool
    continuous_usage: bool
    echo: tuple[str, ...] = ()
    form: MessageForm = PLAIN

    @classmethod
    def start(
        cls,
        frontend: Frontend,
        request: GenerationRequest,
        *,
        request_id: str,
        prompts: list[list[int]],
        deltas: AsyncGenerator[Delta, None],
        has_logprobs: bool,
        echo: tuple[str, ...] = (),
        form: MessageForm = PLAIN,
    ) -> Job:
        """The job of a request whose prompts have been encoded and accepted."""
        options = request.stream_options
        include_usage = bool(options and options.include_usage)
        n = request.n or 1
        return cls(
            id=request_id,
            created=int(time.time()),
            model=request.model or frontend.model_name,
            fingerprint=frontend.fingerprint,
            tokenizer=frontend.tokenizer,
            deltas=deltas,
            num_answers=len(prompts) * n,
            usage=UsageCount(sum(map(len, prompts)), n),
            has_logprobs=has_logprobs,
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            echo=echo,
            form=form,
        )


def new_id(prefix: str, request_id: str = "") -> str:
    """The id of a reply: from the client's own request id if it gave one."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"
