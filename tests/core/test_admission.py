"""Which requests a scheduler admits, and which it rejects."""

import pytest

from jaxserve.core.plan import StepResult
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason
from jaxserve.testing.scheduling import EOS, OTHER, add, make_scheduler, parts, shape, update


class TestAdmission:
    def test_assigns_the_lowest_free_row_and_runs_at_most_max_num_seqs(self):
        scheduler = make_scheduler(max_num_seqs=3)
        add(scheduler, *"abcd")
        plan = scheduler.schedule(0.0)
        assert {i: p.row for i, p in parts(plan).items()} == {"a": 0, "b": 1, "c": 2}
        update(scheduler, plan, a=EOS, b=EOS)
        add(scheduler, "e")
        new = parts(scheduler.schedule(0.0))
        assert {i: (p.row, p.is_new) for i, p in new.items()} == {
            "c": (2, False),
            "d": (0, True),
            "e": (1, True),
        }

    def test_no_request_overtakes_a_head_of_the_queue_that_lacks_blocks(self):
        scheduler = make_scheduler(num_blocks=8 + 1)
        add(scheduler, "a", num_prompt_tokens=4 * 5)
        add(scheduler, "b", num_prompt_tokens=4 * 4)
        add(scheduler, "c", num_prompt_tokens=1)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 0, 20, True)]
        update(scheduler, plan, a=EOS)
        assert [p.request_id for p in scheduler.schedule(0.0).scheduled] == ["c", "b"]

    def test_admits_a_prompt_only_if_all_of_it_fits(self):
        scheduler = make_scheduler(num_blocks=8 + 1, max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=4)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "b", num_prompt_tokens=28)
        plan = scheduler.schedule(0.0)
        # One block for a's next token leaves 6 of the 7 that b needs.
        assert shape(plan) == [("a", 4, 1, True)]

    def test_a_chunked_prompt_keeps_the_blocks_for_its_later_chunks(self):
        scheduler = make_scheduler(
            num_blocks=8 + 1, max_num_seqs=2, max_num_batched_tokens=4, policy="priority"
        )
        add(scheduler, "b", num_prompt_tokens=4, priority=1)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "a", num_prompt_tokens=24, priority=0)
        shapes = []
        for _ in range(8):
            plan = scheduler.schedule(0.0)
            shapes.append(shape(plan))
            update(scheduler, plan)
        # b has two blocks and a the other six, all of them from its first chunk on. When b needs a
        # third block, a has used four of its own.
        assert shapes == [
            [("b", 4, 1, True), ("a", 0, 3, False)],
            [("b", 5, 1, True), ("a", 3, 3, False)],
            [("b", 6, 1, True), ("a", 6, 3, False)],
            [("b", 7, 1, True), ("a", 9, 3, False)],
            [("a", 12, 4, False)],
            [("a", 16, 4, False)],
            [("a", 20, 4, True)],
            [("a", 24, 1, True)],
        ]
        assert scheduler.stats().total_preemptions == 1

    @pytest.mark.parametrize(
        ("num_prompt_tokens", "max_tokens", "param"),
        [(100, None, "prompt"), (90, 11, "max_tokens")],
    )
    def test_rejects_a_request_that_can_never_fit(self, num_prompt_tokens, max_tokens, param):
        scheduler = make_scheduler()
        with pytest.raises(ContextLengthError) as caught:
            add(scheduler, "a", num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        assert caught.value.param == param
        assert not scheduler.has_work

    def test_rejects_an_id_in_use_and_keeps_the_first_request(self):
        scheduler = make_scheduler()
        add(scheduler, "a")
        with pytest.raises(InvalidRequestError, match="in use"):
            add(scheduler, "a")
        assert scheduler.stats().num_waiting == 1

    def test_rejects_a_request_that_already_has_all_its_tokens(self):
        scheduler = make_scheduler()
        with pytest.raises(InvalidRequestError, match="4 tokens"):
            add(scheduler, "a", num_prompt_tokens=7, prior=4, max_tokens=4)
        add(scheduler, "a", num_prompt_tokens=7, prior=4, max_tokens=5)

    def test_rejects_an_unknown_policy_and_lists_the_policies(self):
        with pytest.raises(ConfigError, match="fcfs, priority.*'lifo'"):
            make_scheduler(policy="lifo")

    @pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(99, 1), (97, 3)])
    def test_a_completion_ends_at_the_end_of_the_context(
        self, num_prompt_tokens, num_output_tokens
    ):
        scheduler = make_scheduler(max_num_batched_tokens=128)
        add(scheduler, "a", num_prompt_tokens=num_prompt_tokens)
        outputs = []
        while scheduler.has_work:
            outputs += update(scheduler, scheduler.schedule(0.0))
        reasons = [output.finish_reason for output in outputs]
        assert reasons == [None] * (num_output_tokens - 1) + [FinishReason.LENGTH]

    def test_a_pooled_prompt_may_fill_the_context(self):
        scheduler = make_scheduler(num_blocks=25 + 1)
        with pytest.raises(ContextLengthError, match="101 tokens"):
            add(scheduler, "b", num_prompt_tokens=101, pooling="last")
        add(scheduler, "a", num_prompt_tokens=100, pooling="last")
        plans = []
        while scheduler.has_work:
            plans.append(scheduler.schedule(0.0))
            pooled = [[1.0]] * len(plans[-1].pooling)
            outputs = scheduler.update(
                plans[-1], StepResult([[OTHER]] * len(plans[-1].sampling), pooled=pooled)
            )
        assert [shape(plan) for plan in plans] == [[("a", 0, 64, False)], [("a", 64, 36, True)]]
        assert [output.embedding for output in outputs] == [(1.0,)]

    def test_tokens_from_a_dead_engine_are_recomputed_as_output(self):
        scheduler = make_scheduler()
        add(scheduler, "a", num_prompt_tokens=5, prior=2, max_tokens=3)
        plan = scheduler.schedule(0.0)
        (part,) = plan.scheduled
        assert shape(plan) == [("a", 0, 5, True)]
        assert part.num_prompt_tokens == 3
        (output,) = update(scheduler, plan)
        assert output.token_ids == [OTHER]
        assert output.finish_reason == FinishReason.LENGTH
        assert scheduler.stats().total_prompt_tokens == 0
        assert scheduler.stats().total_generation_tokens == 1
