"""A scheduler that tests drive step by step, without an engine."""

from __future__ import annotations

from typing import Any

from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.plan import ScheduledRequest, StepPlan, StepResult
from jaxserve.core.scheduler import Scheduler
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.sampling_params import SamplingParams

EOS, OTHER = 2, 5
"""The end token of every request, and a token that ends none."""


def make_scheduler(**sizes: Any) -> Scheduler:
    """Returns a scheduler whose context is 100 tokens, or what the blocks can hold if less.

    Args:
      **sizes: arguments of `Scheduler` that replace the defaults of this function.
    """
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 100,
        "num_blocks": 33,
        "block_size": 4,
    }
    sizes = {**defaults, **sizes}
    groups = CacheGroups(
        sizes.get("windows", (None,)), sizes["block_size"], sizes["max_num_batched_tokens"]
    )
    sizes["max_model_len"] = groups.longest(sizes["num_blocks"] - 1, sizes["max_model_len"])
    return Scheduler(**sizes)


def add(
    scheduler: Scheduler,
    *request_ids: str,
    num_prompt_tokens: int = 3,
    priority: int = 0,
    arrival_s: float = 0.0,
    prior: int = 0,
    **params: Any,
) -> None:
    """Queues requests with the prompt 10, 11, ..., and ``params`` as their `SamplingParams`."""
    for request_id in request_ids:
        scheduler.add(
            Submit(
                request_id,
                [10 + i for i in range(num_prompt_tokens)],
                SamplingParams(**{"seed": 0, **params}),
                eos_token_id=EOS,
                priority=priority,
                arrival_s=arrival_s,
                num_prior_tokens=prior,
            )
        )


def update(
    scheduler: Scheduler, plan: StepPlan, token: int = OTHER, **tokens: int
) -> list[RequestOutput]:
    """Applies a step that sampled, for each request, its token in ``tokens``, or else ``token``."""
    sampled = [[tokens.get(part.request_id, token)] for part in plan.sampling]
    return scheduler.update(plan, StepResult(sampled))


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """Returns the parts of a plan as (request ID, start, number of tokens, samples)."""
    return [(p.request_id, p.start, p.num_tokens, p.samples) for p in plan.scheduled]


def parts(plan: StepPlan) -> dict[str, ScheduledRequest]:
    """Returns the parts of a plan by request ID."""
    return {part.request_id: part for part in plan.scheduled}
