"""The figures of a benchmark: computed from timings, and shown in a table."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from jaxserve import __version__
from jaxserve.bench.http import Timing
from jaxserve.runner.host_memory import memory_limit


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of requests that were sent at the same time.

    Attributes:
      num_requests, num_prompt_tokens, num_output_tokens: totals over all requests.
      seconds: from sending to the last token.
      output_tokens_per_s: output tokens over ``seconds``, so prefill counts.
      steady_tokens_per_s: the rate while all requests decode, from the time when every request has
        its first token until one has its last; None if there is no such time.
      ttft_median_s, ttft_max_s: seconds from sending to the first token.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    output_tokens_per_s: float
    steady_tokens_per_s: float | None
    ttft_median_s: float
    ttft_max_s: float

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> LoadFigures:
        """Computes the figures from the timings of the requests."""
        began_s = min(t.sent_s for t in timings)
        seconds = max(t.last_s for t in timings) - began_s
        num_output_tokens = sum(t.num_tokens for t in timings)
        waits = sorted(t.first_s - t.sent_s for t in timings)
        return cls(
            num_requests=len(timings),
            num_prompt_tokens=sum(t.num_prompt_tokens for t in timings),
            num_output_tokens=num_output_tokens,
            seconds=seconds,
            output_tokens_per_s=num_output_tokens / seconds,
            steady_tokens_per_s=_steady_rate(timings),
            ttft_median_s=waits[len(waits) // 2],
            ttft_max_s=waits[-1],
        )


def _steady_rate(timings: Sequence[Timing]) -> float | None:
    begin_s = max(t.first_s for t in timings)
    end_s = min(t.last_s for t in timings)
    if end_s <= begin_s:
        return None
    tokens = sum(t.tokens_at(end_s) - t.tokens_at(begin_s) for t in timings)
    return tokens / (end_s - begin_s)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, the versions and the date of a measurement.

    ``memory_bytes`` and ``num_cores`` are what this process may use.
    """

    processor: str
    num_cores: int
    memory_bytes: int
    python: str
    versions: dict[str, str]
    date: str

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.processor}, {self.num_cores} cores, {self.memory_bytes / 2**30:.0f} GiB; "
            f"Python {self.python}, {versions}; {self.date}"
        )

    @classmethod
    def this(cls) -> Machine:
        """Describes this machine, with today's date."""
        packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
        return cls(
            processor=_processor(),
            num_cores=len(psutil.Process().cpu_affinity() or [0]),
            memory_bytes=memory_limit(),
            python=platform.python_version(),
            versions={"jaxserve": __version__, **packages},
            date=datetime.date.today().isoformat(),
        )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run of the benchmark.

    ``cold_start_s`` and ``warm_start_s`` are the seconds from starting the command to the end of a
    first short completion, with an empty and with a filled compilation cache. ``idle_cpu`` is a
    share of one core.
    """

    machine: Machine
    model: str
    server_flags: list[str]
    input_len: int
    output_len: int
    cold_start_s: float | None
    warm_start_s: float
    alone: LoadFigures
    together: LoadFigures
    front_peak_bytes: int
    engine_peak_bytes: int
    idle_cpu: float

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        alone, together = self.alone, self.together
        flags = f" with {' '.join(self.server_flags)}" if self.server_flags else ""
        rows = [
            ("start to first answer, nothing compiled before", _seconds(self.cold_start_s)),
            ("start to first answer, compiled before", _seconds(self.warm_start_s)),
            ("one request: time to first token", _seconds(alone.ttft_median_s)),
            ("one request: decode", _rate(alone.steady_tokens_per_s)),
            (f"{together.num_requests} requests: whole run", _rate(together.output_tokens_per_s)),
            (
                f"{together.num_requests} requests: steady decode",
                _rate(together.steady_tokens_per_s),
            ),
            (
                f"{together.num_requests} requests: time to first token, median and longest",
                f"{_seconds(together.ttft_median_s)}, {_seconds(together.ttft_max_s)}",
            ),
            ("peak memory, front", _mib(self.front_peak_bytes)),
            ("peak memory, engines", _mib(self.engine_peak_bytes)),
            ("idle, share of one core", f"{self.idle_cpu:.1%}"),
        ]
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}{flags}: {self.input_len} tokens in, {self.output_len} out, greedy",
                "",
                "| | |",
                "|---|---|",
                *(f"| {what} | {value} |" for what, value in rows),
            ]
        )


def _seconds(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} output tokens/s"


def _mib(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"
