"""Measures whole steps of an engine against the limits of the card, and the card's idle time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from aot_dump import LISTING, read_launches

from gpu.options import DUMP, Options
from gpu.report import Report
from gpu.served_model import ServedModel
from jaxserve.core.plan import StepPlan
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams

# The host's time is measured with short contexts, where the device's steps are shortest.
SHORT_CONTEXT = 32


def measure_steps(model: ServedModel, options: Options, report: Report) -> None:
    """Measures decode for each batch size, then a prefill."""
    context = 48 if options.tiny else 1024
    for rows in options.batches:
        if model.holds(rows, context):
            _decode(model, rows, context, options, report)
    _prefill(model, options, report)


def _decode(model: ServedModel, rows: int, context: int, options: Options, report: Report) -> None:
    spent, host = _step_seconds(model, model.plans(rows, context - 1, 1), options)
    num_bytes = 2 * model.num_params_used + rows * context * model.bytes_per_token
    floor = num_bytes / (options.fact("copy_GBps") * 1e9)
    alone, _ = _step_seconds(model, model.plans(rows, SHORT_CONTEXT, 1), options)
    served = _served_seconds(model, rows)
    report.add(
        f"decode step, batch {rows}, context {context}",
        ms=spent * 1e3,
        of_roofline=floor / spent,
        graphs=graphs_of_last_step(options.folder),
        host_us=host * 1e6,
        short_ms=alone * 1e3,
        host_gap_us=max(0.0, served - alone) * 1e6,
        gap_of_step=max(0.0, served - alone) / served,
    )


def _prefill(model: ServedModel, options: Options, report: Report) -> None:
    spec = model.spec
    num_tokens = 32 if options.tiny else 8192
    head = spec.vocab_size * spec.hidden_size
    spent, _ = _step_seconds(model, model.plans(1, 0, num_tokens), options)
    attention = 2 * spec.num_heads * spec.head_dim * num_tokens**2 * spec.num_layers
    operations = 2 * (model.num_params_used - head) * num_tokens + attention
    rate = operations / spent / 1e12
    report.add(
        f"prefill of {num_tokens} tokens",
        ms=spent * 1e3,
        TFLOPps=rate,
        of_matmul=rate / options.fact("matmul_TFLOPps"),
        graphs=graphs_of_last_step(options.folder),
    )


def _step_seconds(
    model: ServedModel, plans: tuple[StepPlan, StepPlan], options: Options
) -> tuple[float, float]:
    """Returns the seconds of a step in a full queue, and the host's seconds to start a step.

    If the two are about equal, the host is the bottleneck and the first is not the device's time.
    """
    first, again = plans
    model.runner.execute(first).result()
    model.runner.execute(again).result()
    num_steps = 2 if options.tiny else 32
    start = time.perf_counter()
    handles = [model.runner.execute(again) for _ in range(num_steps)]
    started = time.perf_counter()
    handles[-1].result()
    return (time.perf_counter() - start) / num_steps, (started - start) / num_steps


def _served_seconds(model: ServedModel, rows: int) -> float:
    """Returns the median seconds between steps of an engine that decodes ``rows`` requests.

    Prompts have one token, so that every step is a decode step.
    """
    core = model.core()
    num_tokens = 2 * SHORT_CONTEXT
    params = SamplingParams(temperature=0, max_tokens=num_tokens, seed=0, ignore_eos=True)
    for i in range(rows):
        core.add(Submit(str(i), [i % model.spec.vocab_size], params))
    ends = []
    while core.has_work:
        core.step(time.monotonic())
        ends.append(time.perf_counter())
    # Leaves out the steps that fill the pipeline and the steps in which requests end.
    return float(np.median(np.diff(ends[4:-4])))


def graphs_of_last_step(folder: Path) -> str:
    """Returns the number of CUDA graphs among the host's launches, for the step compiled last."""
    found = (folder / DUMP).glob(f"*jit_step{LISTING}")
    listings = sorted(found, key=lambda path: path.stat().st_mtime)
    if not listings:
        return "unknown"
    launches = read_launches(listings[-1])
    return f"{launches.num_graphs} of {launches.num_graphs + len(launches.outside)}"
