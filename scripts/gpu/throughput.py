"""Measures the engine end to end: many requests at once, from token IDs to token IDs."""

from __future__ import annotations

import time

import numpy as np

from gpu.options import Options
from gpu.report import Report
from gpu.served_model import ServedModel
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams


def workload(options: Options) -> tuple[int, int, int]:
    """Returns the number of requests, tokens per prompt and tokens per completion."""
    return (4, 12, 4) if options.tiny else (256, 512, 128)


def measure_throughput(model: ServedModel, options: Options, report: Report) -> None:
    """Runs the workload twice, first to compile and then to measure."""
    num_requests, input_len, output_len = workload(options)
    _serve(model, options, seed=0)
    compiled = model.runner.num_compilations
    spent = _serve(model, options, seed=1)
    report.add(
        f"engine, {num_requests} requests {input_len}/{output_len}",
        seconds=spent,
        engine_tokens_per_s=num_requests * output_len / spent,
        compiled_meanwhile=model.runner.num_compilations - compiled,
    )


def _serve(model: ServedModel, options: Options, *, seed: int) -> float:
    """Returns the seconds from the arrival of all requests to the last token."""
    num_requests, input_len, output_len = workload(options)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, model.spec.vocab_size, (num_requests, input_len)).tolist()
    params = SamplingParams(temperature=0, max_tokens=output_len, seed=0, ignore_eos=True)
    core = model.core()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(Submit(str(i), prompt, params))
    num_tokens = 0
    while core.has_work:
        num_tokens += sum(len(output.token_ids) for output in core.step(time.monotonic()))
    spent = time.perf_counter() - start
    assert num_tokens == num_requests * output_len
    return spent
