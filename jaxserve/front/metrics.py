"""Counters and histograms of requests and of steps. `server.metrics` renders them.

All of them live in the cells of `front.counts`, so that several processes can count together. An
observation takes well under a microsecond, so every token can be observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import msgspec

from jaxserve.front.counts import NUM_GAUGES, Cells, LocalCounts
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


FINISH_REASONS = ("stop", "length", "abort", "error")

MAX_TOKEN_BOUNDS = 30
"""The most bounds of `token_buckets`; the largest is 5e9. The cells of a histogram of tokens do not
depend on the model, so that they can be shared before its engines have started."""


class Histogram:
    """Counts values in buckets: a cell for each, and one for the sum of the values.

    Args:
      bounds: the upper ends of the buckets, ascending. One more bucket has the values above them.
      cells: where it counts.
      first: its first cell, of ``len(bounds) + 2``.
    """

    __slots__ = ("_cells", "_first", "_sum", "bounds")

    def __init__(self, bounds: tuple[float, ...], cells: Cells, first: int) -> None:
        self.bounds = bounds
        self._cells = cells
        self._first = first
        self._sum = first + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, ``times`` times."""
        cells = self._cells
        cells[self._first + bisect_left(self.bounds, value)] += times
        cells[self._sum] += value if times == 1 else value * times

    @property
    def counts(self) -> list[int]:
        """The number of values in each bucket."""
        return [int(self._cells[cell]) for cell in range(self._first, self._sum)]

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return float(self._cells[self._sum])


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
    """Returns the bounds 1, 2, 5, 10, 20, 50... up to ``max_model_len``, at most 30."""
    bounds = (m * 10**i for i in range(MAX_TOKEN_BOUNDS // 3) for m in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)


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


PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS = range(NUM_GAUGES, NUM_GAUGES + 3)
"""The cells of counters."""

FINISHED = {reason: GENERATION_TOKENS + 1 + i for i, reason in enumerate(FINISH_REASONS)}
"""The cells of the numbers of completions that have ended, by reason."""

BOUNDS: Mapping[str, tuple[float, ...] | None] = {
    "time_to_first_token": TTFT_BOUNDS,
    "inter_token_latency": TOKEN_BOUNDS,
    "max_generation_tokens": None,
    **{name: kind.bounds for name, kind in REQUEST_HISTOGRAMS.items()},
}
"""The bounds of all histograms of `RequestMetrics`; None: those of `token_buckets`."""

*_starts, FIRST_STEP_CELL = accumulate(
    ((MAX_TOKEN_BOUNDS if bounds is None else len(bounds)) + 2 for bounds in BOUNDS.values()),
    initial=GENERATION_TOKENS + 1 + len(FINISHED),
)
FIRST_CELLS = dict(zip(BOUNDS, _starts, strict=True))
"""The first cell of each histogram. The cells after them are those of `StepMetrics`."""

STEP_CELLS = len(STEP_BOUNDS) + 2
"""The cells of the histogram of one engine."""


def num_cells(num_engines: int) -> int:
    """Returns how many cells a process needs, if the server has so many engines."""
    return FIRST_STEP_CELL + num_engines * STEP_CELLS


class RequestMetrics:
    """The counts of requests, of one front process or of all.

    Only the thread of the event loop writes those of its process.

    Args:
      max_model_len: the longest context; gives the buckets for numbers of tokens.
      cells: where to count, or the sums of several processes, to be read; None: new ones.

    Attributes:
      by_request: the histograms of `REQUEST_HISTOGRAMS`, by name.
    """

    def __init__(self, max_model_len: int, cells: Cells | None = None) -> None:
        cells = LocalCounts(num_cells(0)).own if cells is None else cells
        tokens = token_buckets(max_model_len)
        histograms = {
            name: Histogram(tokens if bounds is None else bounds, cells, FIRST_CELLS[name])
            for name, bounds in BOUNDS.items()
        }
        self._cells = cells
        self.time_to_first_token = histograms.pop("time_to_first_token")
        self.inter_token_latency = histograms.pop("inter_token_latency")
        self.max_generation_tokens = histograms.pop("max_generation_tokens")
        self.by_request = histograms
        self._at_the_end = [
            (kind.value, kind.needs_token, histograms[name].observe)
            for name, kind in REQUEST_HISTOGRAMS.items()
        ]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of completions that have produced a token or a vector."""
        return int(self._cells[PROMPT_TOKENS])

    @property
    def cached_tokens(self) -> int:
        """The part of `prompt_tokens` that was in the prefix cache."""
        return int(self._cells[CACHED_TOKENS])

    @property
    def generation_tokens(self) -> int:
        """Tokens that were generated."""
        return int(self._cells[GENERATION_TOKENS])

    @property
    def finished(self) -> Counter[str]:
        """Numbers of completions that have ended, by reason."""
        counts = {reason: int(self._cells[cell]) for reason, cell in FINISHED.items()}
        return Counter({reason: count for reason, count in counts.items() if count})

    def tokens_arrived(self, record: RequestRecord, count: int, now: float) -> None:
        """Counts ``count`` tokens of a completion that arrived together; 0 for an embedding."""
        cells = self._cells
        since = record.last_token_s
        if since:
            more = count
        else:
            record.first_token_s = since = now
            self.time_to_first_token.observe(now - record.arrival_s)
            cells[PROMPT_TOKENS] += record.num_prompt_tokens
            cells[CACHED_TOKENS] += record.num_cached_tokens
            more = count - 1
        if more == 1:
            self.inter_token_latency.observe(now - since)
        elif more > 1:  # tokens that arrive together share the time since the tokens before them
            self.inter_token_latency.observe((now - since) / more, more)
        record.last_token_s = now
        record.num_generated += count
        cells[GENERATION_TOKENS] += count

    def request_ended(self, record: RequestRecord, reason: str, now: float) -> None:
        """Counts a completion that has ended. ``reason``: one of `FINISH_REASONS`."""
        self._cells[FINISHED[reason]] += 1
        has_token = record.first_token_s > 0
        for value_of, needs_token, observe in self._at_the_end:
            value = value_of(record, now) if has_token or not needs_token else None
            if value is not None:
                observe(value)


class StepMetrics:
    """The counts of steps. The process that started the engines counts them, for all fronts.

    Args:
      cells: where to count, or the sums of several processes, to be read. Their number says how
        many engines there are.

    Attributes:
      step_tokens: a histogram of the tokens of a step for each engine, by its index.
    """

    def __init__(self, cells: Cells) -> None:
        firsts = range(FIRST_STEP_CELL, len(cells), STEP_CELLS)
        self.step_tokens = {
            engine: Histogram(STEP_BOUNDS, cells, first) for engine, first in enumerate(firsts)
        }
        self._steps_seen: dict[int, int] = {}

    def step_done(self, event: StepOutputs) -> None:
        """Counts a step of an engine. Heartbeats, which repeat the last step, are ignored."""
        steps = event.stats.total_steps
        if self._steps_seen.get(event.engine) != steps and event.stats.num_step_tokens:
            self._steps_seen[event.engine] = steps
            self.step_tokens[event.engine].observe(event.stats.num_step_tokens)
