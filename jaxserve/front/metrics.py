"""Counters and histograms of requests. `server.metrics` renders them.

An observation takes well under a microsecond, so every token can be observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from jaxserve.ipc.messages import StepOutputs

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
N_BOUNDS = (1, 2, 5, 10, 20)
STEP_BOUNDS = (1, *(8 * 2**i for i in range(12)))


class Histogram:
    """Counts values in buckets. ``bounds`` are the upper ends of the buckets, ascending."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class RequestRecord(msgspec.Struct):
    """The times and counts of one completion. Times are seconds of `time.monotonic()`; 0: not yet.

    Attributes:
      arrival_s: the front received the request.
      num_prompt_tokens: length of the prompt.
      max_tokens: the most tokens that may be generated; 0 for embeddings.
      n: completions for each prompt of the request.
      scheduled_s: the engine first ran the completion.
      first_token_s: the first token arrived; for embeddings, the vector.
      last_token_s: the latest token arrived.
      num_cached_tokens: tokens of the prompt that were in the prefix cache.
      num_generated: tokens that have arrived.
    """

    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    n: int
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_cached_tokens: int = 0
    num_generated: int = 0


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """Returns the bounds 1, 2, 5, 10, 20, 50... up to ``max_model_len``."""
    bounds: list[int] = []
    scale = 1
    while scale <= max_model_len:
        bounds += [scale * m for m in (1, 2, 5) if scale * m <= max_model_len]
        scale *= 10
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class RequestHistogram:
    """A histogram with one value for each finished completion.

    Attributes:
      help: its description in /metrics.
      bounds: upper ends of its buckets; None: those of `token_buckets`.
      value: computes the value from the record and the time of the end; None is not counted.
      needs_token: leave out completions that ended before their first token.
    """

    help: str
    bounds: tuple[float, ...] | None
    value: Callable[[RequestRecord, float], float | None]
    needs_token: bool = True


REQUEST_HISTOGRAMS: Mapping[str, RequestHistogram] = MappingProxyType(
    {
        "request_prompt_tokens": RequestHistogram(
            "Prompt tokens of a request.", None, lambda r, _: r.num_prompt_tokens, False
        ),
        "request_generation_tokens": RequestHistogram(
            "Generated tokens of a request.", None, lambda r, _: r.num_generated, False
        ),
        "request_params_max_tokens": RequestHistogram(
            "max_tokens of a request.", None, lambda r, _: r.max_tokens or None, False
        ),
        "request_params_n": RequestHistogram("n of a request.", N_BOUNDS, lambda r, _: r.n, False),
        "request_prefill_kv_computed_tokens": RequestHistogram(
            "Prompt tokens that were not in the prefix cache.",
            None,
            lambda r, _: r.num_prompt_tokens - r.num_cached_tokens,
        ),
        "request_time_per_output_token_seconds": RequestHistogram(
            "Mean time between two tokens of a request.",
            TOKEN_BOUNDS,
            lambda r, _: (r.last_token_s - r.first_token_s) / max(r.num_generated - 1, 1),
        ),
        "e2e_request_latency_seconds": RequestHistogram(
            "Time from arrival to the end.",
            LATENCY_BOUNDS,
            lambda r, end_s: end_s - r.arrival_s,
            False,
        ),
        "request_queue_time_seconds": RequestHistogram(
            "Time from arrival to the first step.",
            LATENCY_BOUNDS,
            lambda r, _: r.scheduled_s - r.arrival_s,
        ),
        "request_inference_time_seconds": RequestHistogram(
            "Time from the first step to the last token.",
            LATENCY_BOUNDS,
            lambda r, _: r.last_token_s - r.scheduled_s,
        ),
        "request_prefill_time_seconds": RequestHistogram(
            "Time from the first step to the first token.",
            LATENCY_BOUNDS,
            lambda r, _: r.first_token_s - r.scheduled_s,
        ),
        "request_decode_time_seconds": RequestHistogram(
            "Time from the first token to the last.",
            LATENCY_BOUNDS,
            lambda r, _: r.last_token_s - r.first_token_s,
        ),
    }
)
"""The histograms of finished completions, by name without the prefix."""


@dataclass(slots=True)
class RequestMetrics:
    """All counts of one front process. Only the thread of the event loop writes them.

    Attributes:
      by_request: the histograms of `REQUEST_HISTOGRAMS`, by name.
      step_tokens: a histogram of the tokens of a step for each engine, by its index.
      finished: numbers of completions that have ended, by reason.
    """

    max_model_len: int
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    max_generation_tokens: Histogram = field(init=False)
    by_request: dict[str, Histogram] = field(init=False)
    step_tokens: dict[int, Histogram] = field(default_factory=dict)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    _steps_seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = token_buckets(self.max_model_len)
        self.max_generation_tokens = Histogram(tokens)
        self.by_request = {
            name: Histogram(kind.bounds or tokens) for name, kind in REQUEST_HISTOGRAMS.items()
        }

    def step_done(self, event: StepOutputs) -> None:
        """Counts a step of an engine. Heartbeats, which repeat the last step, are ignored."""
        steps = event.stats.total_steps
        if self._steps_seen.get(event.engine) != steps and event.stats.num_step_tokens:
            self._steps_seen[event.engine] = steps
            histogram = self.step_tokens.setdefault(event.engine, Histogram(STEP_BOUNDS))
            histogram.observe(event.stats.num_step_tokens)

    def tokens_arrived(self, record: RequestRecord, count: int, now: float) -> None:
        """Counts ``count`` tokens of a completion that arrived together; 0 for an embedding."""
        if record.first_token_s == 0.0:
            record.first_token_s = now
            self.time_to_first_token.observe(now - record.arrival_s)
            self.prompt_tokens += record.num_prompt_tokens
            self.cached_tokens += record.num_cached_tokens
            more = count - 1
        else:
            more = count
        if more > 0:
            # Tokens that arrive together share the time since the tokens before them.
            since = record.last_token_s or now
            self.inter_token_latency.observe((now - since) / more, more)
        record.last_token_s = now
        record.num_generated += count
        self.generation_tokens += count

    def request_ended(self, record: RequestRecord, reason: str, now: float) -> None:
        """Counts a completion that has ended. ``reason``: a finish reason, "abort" or "error"."""
        self.finished[reason] += 1
        has_token = record.first_token_s > 0
        for name, kind in REQUEST_HISTOGRAMS.items():
            value = kind.value(record, now) if has_token or not kind.needs_token else None
            if value is not None:
                self.by_request[name].observe(value)
