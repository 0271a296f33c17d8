"""An engine that says what it is told to, for tests of what is in front of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from jaxserve.errors import EngineDeadError
from jaxserve.ipc.messages import (
    FinishReason,
    Ready,
    RequestOutput,
    StepStats,
    Submit,
    TokenLogprobs,
)

READY = Ready(
    engine=0,
    pid=1,
    max_model_len=256,
    vocab_size=300,
    block_size=16,
    num_blocks=65,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    decisions=[("context", "256 tokens", "as scripted")],
    num_compilations=0,
    hidden_size=4,
)


def embedding_of(token_ids: Sequence[int], pooling: str) -> list[float]:
    """The vector of a prompt, of `READY.hidden_size` numbers."""
    return [float(sum(token_ids)), float(token_ids[-1]), float(len(token_ids)), float(len(pooling))]


class ScriptedEngine:
    """Implements `Engine`. It ends answers as a real engine does: end tokens, stop ids, length.

    An answer with a grammar ends with the token before the end token. A vector is
    `embedding_of` the prompt; it takes a step, as a token does.

    Args:
      script: the tokens that follow a prompt; when they run out, token 0 follows for ever.
      tokens_per_output: how many tokens come at a time.
      ready: what it has settled on.

    Attributes:
      submitted: every request that has come.
      aborted: ids of those that were closed before their end.
      stall_after: an answer does not go on after so many tokens.
      fail_after: an answer breaks off with an error after so many tokens.
      error: if set, the engine is dead of it.
    """

    def __init__(
        self,
        script: Callable[[Submit], Sequence[int]],
        *,
        tokens_per_output: int = 1,
        ready: Ready = READY,
    ) -> None:
        self.ready = ready
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.stall_after: int | None = None
        self.fail_after: int | None = None
        self.error: Exception | None = None
        self._script = script
        self._tokens_per_output = tokens_per_output
        self._running: dict[str, asyncio.Event] = {}

    @property
    def stats(self) -> dict[int, StepStats]:
        """One engine, in which every request runs at once."""
        return {0: StepStats(num_running=len(self._running))}

    def check_health(self) -> None:
        """Raises ``error`` if it is set."""
        if self.error is not None:
            raise self.error

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].set()

    async def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        """See `Engine.generate`."""
        self.check_health()
        self.submitted.append(request)
        request_id, params = request.request_id, request.params
        told_to_end = self._running[request_id] = asyncio.Event()
        tokens, reason, stop_reason = self._answer(request)
        scheduled_s = time.monotonic()
        finished = False
        try:
            if params.pooling is not None:
                if await self._is_told_to_end(0, told_to_end):
                    yield RequestOutput(request_id, [], FinishReason.ABORT)
                    return
                finished = True
                vector = embedding_of(request.prompt_token_ids, params.pooling)
                yield RequestOutput(
                    request_id, [], FinishReason.STOP, scheduled_s=scheduled_s, embedding=vector
                )
                return
            for start in range(0, len(tokens), self._tokens_per_output):
                if await self._is_told_to_end(start, told_to_end):
                    yield RequestOutput(request_id, [], FinishReason.ABORT)
                    return
                ids = tokens[start : start + self._tokens_per_output]
                finished = start + len(ids) == len(tokens)
                logprobs = None
                if params.logprobs is not None:
                    logprobs = [logprobs_of(i, params.logprobs) for i in ids]
                yield RequestOutput(
                    request_id,
                    ids,
                    reason if finished else None,
                    stop_reason if finished else None,
                    logprobs,
                    num_cached_tokens=len(request.prompt_token_ids) // 16 * 16,
                    scheduled_s=scheduled_s,
                    prompt_logprobs=_prompt_logprobs(request) if start == 0 else None,
                )
        finally:
            del self._running[request_id]
            if not finished:
                self.aborted.append(request_id)

    async def _is_told_to_end(self, num_tokens: int, told: asyncio.Event) -> bool:
        """Takes a step after ``num_tokens``, for ever if it is to stall there."""
        await asyncio.sleep(0)
        self._check_faults(num_tokens)
        if self.stall_after is not None and num_tokens >= self.stall_after:
            await told.wait()
        return told.is_set()

    def _check_faults(self, num_tokens: int) -> None:
        self.check_health()
        if self.fail_after is not None and num_tokens >= self.fail_after:
            raise EngineDeadError("the engine was told to fail")

    def _answer(self, submit: Submit) -> tuple[list[int], FinishReason, int | None]:
        params = submit.params
        assert params.max_tokens is not None
        script = list(self._script(submit))
        tokens: list[int] = []
        while len(tokens) < params.max_tokens:
            token = script[len(tokens)] if len(tokens) < len(script) else 0
            if params.grammar is not None and tokens and token == submit.eos_token_id:
                return tokens, FinishReason.STOP, None
            tokens.append(token)
            if len(tokens) > params.min_tokens:
                if token == submit.eos_token_id:
                    return tokens, FinishReason.STOP, None
                if token in params.stop_token_ids:
                    return tokens, FinishReason.STOP, token
        return tokens, FinishReason.LENGTH, None


def _prompt_logprobs(submit: Submit) -> list[TokenLogprobs | None] | None:
    k = submit.params.prompt_logprobs
    if k is None:
        return None
    return [None, *(logprobs_of(token_id, k) for token_id in submit.prompt_token_ids[1:])]


def logprobs_of(token_id: int, k: int) -> TokenLogprobs:
    """Made-up values: the sampled token is the second of the ``k`` likeliest, ids going up.

    The likeliest but for these is impossible, so that minus infinity occurs.
    """
    likeliest = [max(token_id - 1, 0) + i for i in range(k)]
    values = [-0.5 - i for i in range(k)]
    if k > 2:
        values[-1] = float("-inf")
    sampled = values[likeliest.index(token_id)] if token_id in likeliest else -9.0
    return TokenLogprobs([token_id, *likeliest], [sampled, *values], 2)
