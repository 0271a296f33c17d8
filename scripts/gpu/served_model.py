"""An engine in this process, for a model with random weights made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from gpu.models import BLOCK_SIZE, abstract_cache, abstract_params, backend_for, random_params
from jaxserve.core.plan import ScheduledRequest, Sizes, StepPlan, TableUpdate
from jaxserve.core.scheduler import Scheduler
from jaxserve.device import Device
from jaxserve.engine.core import EngineCore
from jaxserve.models.spec import ModelSpec
from jaxserve.runner import kv_cache
from jaxserve.runner.buckets import table_widths
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams

DTYPE = "bfloat16"
# The fraction of the free memory for the cache; the rest is for the steps.
_CACHE_FRACTION = 0.85


@dataclass(frozen=True)
class EngineSize:
    """The requested sizes of an engine, as in `core.plan.Sizes`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int


class ServedModel:
    """The weights, cache and runner of a model.

    The cache has as many blocks as ``size`` asks for, or as many as fit the free memory.

    Attributes:
      spec: the shape of the model.
      sizes: the sizes of the engine.
      runner: the runner, which has compiled nothing yet.
      num_params_used: number of weights that a decode step reads.
      bytes_per_token: bytes of the cache per token.
    """

    def __init__(self, spec: ModelSpec, size: EngineSize, device: Device) -> None:
        self.spec = spec
        bind, shapes = abstract_params(spec, DTYPE)
        params = jax.block_until_ready(random_params(shapes))
        # A step reads only a few rows of the input embedding, unless it is the output head too.
        embedding = 0 if spec.tied_head else spec.vocab_size * spec.hidden_size
        self.num_params_used = sum(leaf.size for leaf in jax.tree.leaves(shapes)) - embedding
        cache = {
            "num_layers": spec.cache_layout.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "dtype": DTYPE,
        }
        self.bytes_per_token = kv_cache.bytes_per_token(**cache)
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("bytes_limit", 2**31) - stats.get("bytes_in_use", 0)
        fitting = int(free * _CACHE_FRACTION) // (self.bytes_per_token * BLOCK_SIZE)
        self.sizes = Sizes(
            max_model_len=size.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=min(size.num_blocks, fitting),
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_num_batched_tokens,
            windows=spec.cache_layout.windows,
        )
        self.runner = ModelRunner(
            bind,
            params,
            kv_cache.allocate(abstract_cache(spec, num_blocks=self.sizes.num_blocks, dtype=DTYPE)),
            attention=backend_for("pallas_triton", spec, device, DTYPE),
            sizes=self.sizes,
            vocab_size=spec.vocab_size,
            table_widths=table_widths(size.max_model_len, BLOCK_SIZE),
        )

    def core(self) -> EngineCore:
        """Returns an engine without requests that keeps two steps in flight."""
        sizes = self.sizes
        scheduler = Scheduler(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            windows=sizes.windows,
        )
        return EngineCore(scheduler, self.runner, depth=2)

    def holds(self, num_rows: int, context: int) -> bool:
        """Returns whether the cache has blocks for ``num_rows`` contexts."""
        return num_rows * -(-context // BLOCK_SIZE) < self.sizes.num_blocks

    def plans(self, num_rows: int, start: int, num_tokens: int) -> tuple[StepPlan, StepPlan]:
        """Returns two plans of a step of ``num_rows`` requests with ``num_tokens`` tokens each.

        The tokens start at position ``start``. In the first plan the requests are new; the second
        repeats the step.
        """
        first, again = (
            StepPlan(
                step_id=0,
                scheduled=tuple(
                    self._scheduled(row, start, num_tokens, is_new=is_new)
                    for row in range(num_rows)
                ),
            )
            for is_new in (True, False)
        )
        return first, again

    def _scheduled(
        self, row: int, start: int, num_tokens: int, *, is_new: bool
    ) -> ScheduledRequest:
        end = start + num_tokens
        blocks_each = -(-end // BLOCK_SIZE)
        blocks = range(1 + row * blocks_each, 1 + (row + 1) * blocks_each)
        tokens: Any = range(num_tokens) if num_tokens > 1 else ()
        return ScheduledRequest(
            request_id=str(row),
            row=row,
            is_new=is_new,
            start=start,
            num_tokens=num_tokens,
            token_ids=tokens,
            table_updates=[TableUpdate(0, 0, blocks)] if is_new else (),
            samples=True,
            params=SamplingParams(temperature=0, max_tokens=1, seed=0),
            eos_token_id=None,
            num_prompt_tokens=end,
            known_token_ids=(),
        )
