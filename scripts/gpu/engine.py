"""Measures the whole engine with random weights: its steps, then its throughput."""

from __future__ import annotations

from gpu.models import BLOCK_SIZE, spec_of
from gpu.options import Options
from gpu.report import Report
from gpu.served_model import EngineSize, ServedModel
from gpu.steps import measure_steps
from gpu.throughput import measure_throughput
from jaxserve.runner.device import current_device

REAL = EngineSize(
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    num_blocks=1 + 256 * 1024 // BLOCK_SIZE,
)
TINY = EngineSize(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, num_blocks=33)


def run(options: Options, report: Report) -> None:
    """Builds the engine once and runs both measurements."""
    size = TINY if options.tiny else REAL
    model = ServedModel(spec_of(options.models[0]), size, current_device())
    report.add("engine", model=options.models[0], cache_tokens=model.sizes.num_blocks * BLOCK_SIZE)
    measure_steps(model, options, report)
    measure_throughput(model, options, report)
