"""Renders the metrics in the text format of Prometheus, under the names of vLLM.

The text is written by hand: that takes a tenth of the time of the Prometheus client library, and
scrapers may ask several times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jaxserve.front.metrics import (
    FINISH_REASONS,
    REQUEST_HISTOGRAMS,
    Histogram,
    RequestMetrics,
    StepMetrics,
)
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A number that each engine reports with its steps. ``kind``: ``gauge`` or ``counter``."""

    help: str
    kind: str
    value: Callable[[StepStats], float]


ENGINE_METRICS: Mapping[str, EngineMetric] = {
    "num_requests_running": EngineMetric(
        "Requests that are running.", "gauge", lambda s: s.num_running
    ),
    "num_requests_waiting": EngineMetric(
        "Requests that wait to run.", "gauge", lambda s: s.num_waiting
    ),
    "kv_cache_usage_perc": EngineMetric(
        "Share of the KV cache in use, 0 to 1.", "gauge", lambda s: s.kv_usage
    ),
    "num_preemptions_total": EngineMetric(
        "Preemptions: a request lost its blocks and is computed again.",
        "counter",
        lambda s: s.total_preemptions,
    ),
    "corrupted_requests_total": EngineMetric(
        "Requests that failed because their logits were not finite; 0 with --on-nonfinite ignore.",
        "counter",
        lambda s: s.total_corrupted,
    ),
    "compilations_total": EngineMetric(
        "Programs compiled since the engine started.", "counter", lambda s: s.total_compilations
    ),
    "engine_restarts_total": EngineMetric(
        "Restarts of the engine process.", "counter", lambda s: s.total_restarts
    ),
    "steps_total": EngineMetric("Steps run.", "counter", lambda s: s.total_steps),
}

DRAFT_METRICS: Mapping[str, EngineMetric] = {
    "spec_decode_num_drafts_total": EngineMetric(
        "Steps of requests for which drafts were proposed.", "counter", lambda s: s.total_drafts
    ),
    "spec_decode_num_draft_tokens_total": EngineMetric(
        "Draft tokens.", "counter", lambda s: s.total_draft_tokens
    ),
    "spec_decode_num_accepted_tokens_total": EngineMetric(
        "Draft tokens that were accepted.", "counter", lambda s: sum(s.accepted_per_position)
    ),
}
"""The metrics of engines that speculate."""


@dataclass(frozen=True, slots=True)
class FrontMetric:
    """A number that the front processes count."""

    help: str
    value: Callable[[RequestMetrics], float]


FRONT_COUNTERS: Mapping[str, FrontMetric] = {
    "prompt_tokens_total": FrontMetric(
        "Prompt tokens of requests that have produced a token.", lambda m: m.prompt_tokens
    ),
    "generation_tokens_total": FrontMetric("Generated tokens.", lambda m: m.generation_tokens),
}


def render(text_engine: TextEngine, *, prefix: str) -> str:
    """Returns the page for a scraper. Every name starts with ``prefix`` and a colon.

    Requests are counted in the front processes, not for each engine: with several engines these
    numbers have the label ``engine="all"``. They are the sums over all processes of the server.
    """
    stats, totals = text_engine.engine.stats, text_engine.counts.totals()
    metrics = RequestMetrics(text_engine.model.max_model_len, totals)
    model = f'model_name="{_escape(text_engine.model.name)}"'
    engines = {index: f'{model},engine="{index}"' for index in stats}
    front = next(iter(engines.values())) if len(engines) == 1 else f'{model},engine="all"'

    drafting = {index: each.accepted_per_position for index, each in stats.items()}
    engine_metrics = {**ENGINE_METRICS, **(DRAFT_METRICS if any(drafting.values()) else {})}

    finished = metrics.finished

    def lines() -> Iterator[str]:
        for name, engine_metric in engine_metrics.items():
            yield from _header(prefix, name, engine_metric.kind, engine_metric.help)
            for index, labels in engines.items():
                yield f"{prefix}:{name}{{{labels}}} {engine_metric.value(stats[index])}"
        if any(drafting.values()):
            yield from _accepted_per_position(prefix, engines, drafting)
        for name, front_metric in FRONT_COUNTERS.items():
            yield from _header(prefix, name, "counter", front_metric.help)
            yield f"{prefix}:{name}{{{front}}} {front_metric.value(metrics)}"
        yield from _header(
            prefix, "request_success_total", "counter", "Finished requests, by finish reason."
        )
        for reason in FINISH_REASONS:
            labels = f'{front},finished_reason="{reason}"'
            yield f"{prefix}:request_success_total{{{labels}}} {finished[reason]}"
        yield from _cache_config(text_engine, prefix, list(engines.values()))
        name = "iteration_tokens_total"
        yield from _header(prefix, name, "histogram", "Tokens in a step.")
        for index, histogram in StepMetrics(totals).step_tokens.items():
            yield from _histogram(prefix, name, engines.get(index, front), histogram)
        for name, (text, histogram) in _front_histograms(metrics).items():
            yield from _header(prefix, name, "histogram", text)
            yield from _histogram(prefix, name, front, histogram)

    return "\n".join(lines()) + "\n"


def _accepted_per_position(
    prefix: str, engines: Mapping[int, str], drafting: Mapping[int, tuple[int, ...]]
) -> Iterator[str]:
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    yield from _header(prefix, name, "counter", "Accepted drafts, by position in their step.")
    for index, accepted in drafting.items():
        for position, count in enumerate(accepted):
            yield f'{prefix}:{name}{{{engines[index]},position="{position}"}} {count}'


def _front_histograms(metrics: RequestMetrics) -> dict[str, tuple[str, Histogram]]:
    histograms = {
        "time_to_first_token_seconds": (
            "Time from arrival to the first token.",
            metrics.time_to_first_token,
        ),
        "inter_token_latency_seconds": ("Time between two tokens.", metrics.inter_token_latency),
        "request_max_num_generation_tokens": (
            "Tokens of the longest completion of a request.",
            metrics.max_generation_tokens,
        ),
    }
    for name, kind in REQUEST_HISTOGRAMS.items():
        histograms[name] = (kind.help, metrics.by_request[name])
    return histograms


def _cache_config(text_engine: TextEngine, prefix: str, engines: list[str]) -> Iterator[str]:
    ready = text_engine.engine.ready
    sizes = f'block_size="{ready.block_size}",num_gpu_blocks="{ready.num_blocks}"'
    yield from _header(prefix, "cache_config_info", "gauge", "Sizes of the KV cache, as labels.")
    for labels in engines:
        yield f"{prefix}:cache_config_info{{{labels},{sizes}}} 1"


def _header(prefix: str, name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {prefix}:{name} {text}", f"# TYPE {prefix}:{name} {kind}"


def _histogram(prefix: str, name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        le = bound if isinstance(bound, str) else float(bound)
        yield f'{prefix}:{name}_bucket{{{labels},le="{le}"}} {total}'
    yield f"{prefix}:{name}_sum{{{labels}}} {histogram.sum}"
    yield f"{prefix}:{name}_count{{{labels}}} {total}"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
