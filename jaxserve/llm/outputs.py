"""The outputs of an `LLM`, with fields named as in vLLM, and the code that fills them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from jaxserve.errors import EngineDeadError
from jaxserve.front.metrics import RequestRecord
from jaxserve.front.outputs import Delta
from jaxserve.front.vectors import unit
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token. The most likely token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a prompt with all its completions: seconds since the epoch, as of `time.time`.

    Attributes:
      arrival_time: the request was made.
      first_scheduled_time: the engine first ran it; None: never.
      first_token_time: the first token arrived, or the vector; None: none did.
      last_token_time: the last token arrived; None: none did.
      finished_time: the last completion ended.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from the arrival to the first step; None if the engine never ran the request."""
        first = self.first_scheduled_time
        return None if first is None else first - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: 0 to n - 1.
      text: the text, without the stop string or stop token unless the request includes it.
      token_ids: the generated tokens, including the token that ended the completion.
      logprobs: for each token, the sampled and the most likely tokens by ID; None if not requested.
      finish_reason: "stop", "length", "abort" or "error"; None: it has not ended.
      stop_reason: the stop string or stop ID that ended the completion.
      embedding: with `SamplingParams.pooling`, the vector of the prompt, not normalised.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    embedding: list[float] | None = None


@dataclass(slots=True)
class LLMOutput:
    """A prompt and its completions.

    Attributes:
      prompt: the string, or None if the prompt was given as token IDs.
      prompt_token_ids: the tokens of the prompt.
      outputs: the ``n`` completions of the prompt.
      num_cached_tokens: tokens of the prompt that came from the prefix cache.
      prompt_logprobs: for each token of the prompt, this and the most likely tokens by ID, and None
        for the first; None if not requested.
      metrics: the times of the request; None: it has not run. Outputs are compared without them.
      error: why the request failed; None: it did not. The completions have what came before, and
        those that had not ended have the finish reason "error".
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions have ended, and none with an error."""
        reasons = [completion.finish_reason for completion in self.outputs]
        return self.error is None and None not in reasons

    def fail(self, reason: str) -> None:
        """Ends the request with an error."""
        self.error = reason
        for completion in self.outputs:
            completion.finish_reason = completion.finish_reason or "error"


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt; None if the request failed."""

    embedding: list[float] | None


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector, ``outputs.embedding``. The other fields are as in `LLMOutput`."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
    error: str | None = None

    @classmethod
    def of(cls, output: LLMOutput, *, normalize: bool) -> EmbeddingRequestOutput:
        """Returns the vector of a pooling request, scaled to length 1 if ``normalize``."""
        vector = output.outputs[0].embedding
        if vector is not None and normalize:
            vector = unit(vector)
        return cls(
            output.prompt,
            output.prompt_token_ids,
            EmbeddingOutput(vector),
            output.num_cached_tokens,
            output.metrics,
            output.error,
        )


class CallFailedError(EngineDeadError):
    """The engine failed or was closed during a call of an `LLM`.

    Attributes:
      outputs: all outputs of the call, in order. Those that are ``finished`` are complete. Empty if
        no request had begun.
    """

    def __init__(self, message: str, outputs: list[LLMOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


async def collect(
    deltas: AsyncGenerator[Delta, None], output: LLMOutput, tokenizer: Tokenizer
) -> None:
    """Fills ``output`` with the completions that ``deltas`` describe, as far as they come."""
    texts: list[list[str]] = [[] for _ in output.outputs]
    records: dict[int, RequestRecord] = {}
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                texts[delta.index].append(delta.text)
                if delta.record is not None:
                    records[delta.index] = delta.record
                _add(delta, output, tokenizer)
    finally:
        for completion, pieces in zip(output.outputs, texts, strict=True):
            completion.text = "".join(pieces)
        if records:
            output.metrics = _metrics(list(records.values()))


def _add(delta: Delta, output: LLMOutput, tokenizer: Tokenizer) -> None:
    completion = output.outputs[delta.index]
    completion.token_ids += delta.token_ids
    if delta.logprobs is not None:
        completion.logprobs = completion.logprobs or []
        completion.logprobs += [_by_id(entry, tokenizer) for entry in delta.logprobs]
    completion.finish_reason = delta.finish_reason
    completion.stop_reason = delta.stop_reason
    completion.embedding = None if delta.embedding is None else list(delta.embedding)
    if delta.index != 0:
        return
    output.num_cached_tokens = delta.num_cached_tokens
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = [
            None if entry is None else _by_id(entry, tokenizer) for entry in delta.prompt_logprobs
        ]


def _metrics(records: list[RequestRecord]) -> RequestMetrics:
    """Returns the times of a prompt from those of its completions."""
    now = time.monotonic()
    epoch_s = time.time() - now  # the time of the start of the monotonic clock

    def first(times: list[float]) -> float | None:
        known = [epoch_s + each for each in times if each > 0]
        return min(known, default=None)

    last_token_s = max(record.last_token_s for record in records)
    return RequestMetrics(
        arrival_time=epoch_s + records[0].arrival_s,
        first_scheduled_time=first([record.scheduled_s for record in records]),
        first_token_time=first([record.first_token_s for record in records]),
        last_token_time=first([last_token_s]),
        finished_time=epoch_s + now,
    )


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Returns the tokens at one position by ID: the actual one, then the most likely others."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    by_id: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        by_id.setdefault(token_id, Logprob(logprob, rank, text))
    return by_id
