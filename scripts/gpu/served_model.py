"""An engine in this process, for a model with random weights that are made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from gpu.models import BLOCK_SIZE, abstract_params, backend_for, random_params
from jaxserve.core.plan import ScheduledRequest, Sizes, StepPlan
from jaxserve.core.scheduler import Scheduler
from jaxserve.device import Device
from jaxserve.engine.core import EngineCore
from jaxserve.models.spec import ModelSpec
from jaxserve.runner import kv_cache
from jaxserve.runner.buckets import table_widths
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams

DTYPE = "bfloat16"
# Part of the free memory for the cache; the rest is for the steps.
_PART = 0.85


@dataclass(frozen=True)
class Wanted:
    """How large an engine is to be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int


class ServedModel:
    """Weights, cache and runner of a model; as many blocks as wanted, or as fit.

    Attributes:
      sizes: of the engine.
      runner: with nothing compiled yet.
      num_params_used: weights that a decode step reads.
      bytes_per_token: of the cache.
    """

    def __init__(self, spec: ModelSpec, wanted: Wanted, device: Device) -> None:
        self.spec = spec
        bind, shapes = abstract_params(spec, DTYPE)
        params = jax.block_until_ready(random_params(shapes))
        # Of the input embedding a step reads a few rows only, unless it is the head too.
        embedding = 0 if spec.tied_head else spec.vocab_size * spec.hidden_size
        self.num_params_used = sum(leaf.size for leaf in jax.tree.leaves(shapes)) - embedding
        cache = {
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "dtype": DTYPE,
        }
        self.bytes_per_token = kv_cache.bytes_per_token(**cache)
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("bytes_limit", 2**31) - stats.get("bytes_in_use", 0)
        fitting = int(free * _PART) // (self.bytes_per_token * BLOCK_SIZE)
        self.sizes = Sizes(
            max_model_len=wanted.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=min(wanted.num_blocks, fitting),
            max_num_seqs=wanted.max_num_seqs,
            max_num_batched_tokens=wanted.max_num_batched_tokens,
        )
        self.runner = ModelRunner(
            bind,
            params,
            kv_cache.allocate(**cache, num_blocks=self.sizes.num_blocks, block_size=BLOCK_SIZE),
            attention=backend_for("pallas_triton", spec, device, DTYPE),
            sizes=self.sizes,
            vocab_size=spec.vocab_size,
            table_widths=table_widths(wanted.max_model_len, BLOCK_SIZE),
        )

    def core(self) -> EngineCore:
        """An engine without requests, which overlaps its steps."""
        sizes = self.sizes
        scheduler = Scheduler(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
        )
        return EngineCore(scheduler, self.runner, depth=2)

    def holds(self, num_rows: int, context: int) -> bool:
        """Whether the cache has blocks for so many contexts."""
        return num_rows * -(-context // BLOCK_SIZE) < self.sizes.num_blocks

    def plans(self, num_rows: int, start: int, num_tokens: int) -> tuple[StepPlan, StepPlan]:
        """A step of so many requests that run the tokens from position ``start`` on.

        Returns the plan with which the requests enter and the one that repeats the step.
        """
        first, again = (
            StepPlan(
                step_id=0,
                scheduled=tuple(
                    self._part(row, start, num_tokens, is_new=is_new) for row in range(num_rows)
                ),
            )
            for is_new in (True, False)
        )
        return first, again

    def _part(self, row: int, start: int, num_tokens: int, *, is_new: bool) -> ScheduledRequest:
        end = start + num_tokens
        each = -(-end // BLOCK_SIZE)
        tokens: Any = range(num_tokens) if num_tokens > 1 else ()
        return ScheduledRequest(
            request_id=str(row),
            row=row,
            is_new=is_new,
            start=start,
            num_tokens=num_tokens,
            token_ids=tokens,
            block_offset=0,
            new_block_ids=range(1 + row * each, 1 + (row + 1) * each) if is_new else (),
            samples=True,
            params=SamplingParams(temperature=0, max_tokens=1, seed=0),
            eos_token_id=None,
            num_prompt_tokens=end,
            known_token_ids=(),
        )
