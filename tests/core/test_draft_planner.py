"""Drafts of running requests: the blocks that they may take."""

import pytest

from jaxserve.core.plan import StepResult
from jaxserve.core.scheduler import Scheduler
from jaxserve.core.speculation import Speculation
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams


@pytest.mark.parametrize("num_free", [1, 2, 3])
def test_drafts_get_only_the_blocks_that_no_last_token_needs(num_free):
    """The last token of "b" needs a block; so do the drafts of "a", and those of "b" do not."""
    scheduler = Scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=12,
        num_blocks=1 + 3 + num_free,
        block_size=4,
        speculation=Speculation(3, step_costs=((8, 1.0),)),
    )
    for request_id, num_prompt_tokens in (("a", 6), ("b", 4)):
        prompt = list(range(num_prompt_tokens))
        scheduler.add(Submit(request_id, prompt, SamplingParams(seed=0)))
    scheduler.update(scheduler.schedule(0.0), StepResult([[5], [5]]))
    plan = scheduler.schedule(0.0)
    assert scheduler.stats().total_preemptions == 0
    drafts = {part.request_id: part.num_drafts for part in plan.scheduled}
    assert drafts == {"a": 3 if num_free > 1 else 0, "b": 3}
    scheduler.check_integrity()
