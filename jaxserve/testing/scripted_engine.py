"""An engine with scripted output, for tests of the front."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack

import msgspec

from jaxserve.errors import EngineDeadError
from jaxserve.ipc.messages import (
    Decision,
    FinishReason,
    Ready,
    RequestOutput,
    StepStats,
    Submit,
    TokenLogprobs,
)

READY = Ready(
    engine=0,
    max_model_len=256,
    vocab_size=300,
    block_size=16,
    num_blocks=65,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    decisions=[Decision("context", "256 tokens", "as scripted")],
    hidden_size=4,
)


def embedding_of(token_ids: Sequence[int], pooling: str) -> list[float]:
    """Returns the vector of a prompt, of length `READY.hidden_size`."""
    return [float(sum(token_ids)), float(token_ids[-1]), float(len(token_ids)), float(len(pooling))]


class ScriptedEngine:
    """Implements `Engine`. Requests end as on a real engine: end token, stop token IDs, length.

    A request with a grammar ends before the end token. A pooling request gets `embedding_of` its
    prompt after one step.

    Args:
      script: returns the output tokens for a request. After them, token 0 repeats for ever.
      tokens_per_output: tokens in each output.
      ready: the resolved settings.

    Attributes:
      submitted: every request so far.
      aborted: IDs of the requests that were closed before their end.
      stall_after: a request stops after this many tokens until it is aborted; None: never.
      fail_after: requests fail with ``failure`` after this many tokens; None: never.
      failure: by default an EngineDeadError.
      error: if set, `generate` and `check_health` raise it.
      base_stats: the state that `stats` reports, apart from the running requests.
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
        self.failure: Exception = EngineDeadError("the engine was told to fail")
        self.error: Exception | None = None
        self.base_stats = StepStats()
        self._script = script
        self._tokens_per_output = tokens_per_output
        self._running: dict[str, asyncio.Event] = {}

    @property
    def stats(self) -> dict[int, StepStats]:
        """The state of one engine that runs every request at once."""
        return {0: msgspec.structs.replace(self.base_stats, num_running=len(self._running))}

    def check_health(self) -> None:
        """Raises ``error`` if it is set."""
        if self.error is not None:
            raise self.error

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].set()

    async def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `Engine.generate`."""
        self.check_health()
        self.submitted.append(request)
        request_id, params = request.request_id, request.params
        abort_event = self._running[request_id] = asyncio.Event()
        tokens, reason, stop_reason = self._output(request)
        scheduled_s = time.monotonic()
        finished = False
        at_end = ExitStack()
        if on_ended is not None:
            at_end.callback(on_ended)
        try:
            if params.pooling is not None:
                if await self._step_is_aborted(0, abort_event):
                    yield RequestOutput(request_id, [], FinishReason.ABORT)
                    return
                finished = True
                at_end.close()
                vector = embedding_of(request.prompt_token_ids, params.pooling)
                yield RequestOutput(
                    request_id,
                    [],
                    FinishReason.STOP,
                    scheduled_s=scheduled_s,
                    embedding=tuple(vector),
                )
                return
            for start in range(0, len(tokens), self._tokens_per_output):
                if await self._step_is_aborted(start, abort_event):
                    yield RequestOutput(request_id, [], FinishReason.ABORT)
                    return
                ids = tokens[start : start + self._tokens_per_output]
                finished = start + len(ids) == len(tokens)
                if finished:
                    at_end.close()
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
            at_end.close()
            del self._running[request_id]
            if not finished:
                self.aborted.append(request_id)

    async def _step_is_aborted(self, num_tokens: int, abort_event: asyncio.Event) -> bool:
        """Waits for the step after ``num_tokens``; returns whether the request was aborted."""
        await asyncio.sleep(0)
        self._check_faults(num_tokens)
        if self.stall_after is not None and num_tokens >= self.stall_after:
            await abort_event.wait()
        return abort_event.is_set()

    def _check_faults(self, num_tokens: int) -> None:
        self.check_health()
        if self.fail_after is not None and num_tokens >= self.fail_after:
            raise self.failure

    def _output(self, submit: Submit) -> tuple[list[int], FinishReason, int | None]:
        """Returns all output tokens of a request, its finish reason and its stop reason."""
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
    """Returns fake logprobs: the ``k`` most likely IDs ascend, and the token is the second of them.

    With k > 2 the last of them has the log probability minus infinity.
    """
    most_likely = [max(token_id - 1, 0) + i for i in range(k)]
    values = [-0.5 - i for i in range(k)]
    if k > 2:
        values[-1] = float("-inf")
    sampled = values[most_likely.index(token_id)] if token_id in most_likely else -9.0
    return TokenLogprobs((token_id, *most_likely), (sampled, *values), 2)
