"""Scheduler, plan by plan. test_scheduler_properties.py checks the tokens of random scenarios."""

import pytest

from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.plan import StepResult
from jaxserve.core.scheduler import Scheduler
from jaxserve.core.speculation import Speculation
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit, TokenLogprobs
from jaxserve.sampling_params import SamplingParams

EOS, OTHER = 2, 5


def make_scheduler(**sizes):
    """Returns a scheduler whose context is 100 tokens, or what the blocks can hold if less."""
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


def submit(request_id, num_prompt_tokens=3, *, priority=0, arrival_s=0.0, prior=0, **params):
    params = SamplingParams(**{"seed": 0, **params})
    prompt = [10 + i for i in range(num_prompt_tokens)]
    return Submit(
        request_id,
        prompt,
        params,
        eos_token_id=EOS,
        priority=priority,
        arrival_s=arrival_s,
        num_prior_tokens=prior,
    )


def add(scheduler, *request_ids, **options):
    for request_id in request_ids:
        scheduler.add(submit(request_id, **options))


def update(scheduler, plan, token=OTHER, **tokens):
    """Applies a step that sampled ``token`` for every request that is not in ``tokens``."""
    sampled = [[tokens.get(part.request_id, token)] for part in plan.sampling]
    return scheduler.update(plan, StepResult(sampled))


def shape(plan):
    """Returns the parts of a plan as (request ID, start, number of tokens, samples)."""
    return [(p.request_id, p.start, p.num_tokens, p.samples) for p in plan.scheduled]


def parts(plan):
    return {part.request_id: part for part in plan.scheduled}


class TestOneStepInFlight:
    def test_prefills_then_decodes_one_token_per_step(self):
        scheduler = make_scheduler()
        add(scheduler, "a", num_prompt_tokens=5)
        plan = scheduler.schedule(now=7.0)
        (part,) = plan.scheduled
        assert shape(plan) == [("a", 0, 5, True)]
        assert part.token_ids == [10, 11, 12, 13, 14]
        assert part.is_new
        assert part.row == 0
        assert part.table_updates == [(0, 0, [1, 2])]
        assert (part.num_prompt_tokens, part.eos_token_id) == (5, EOS)
        (output,) = update(scheduler, plan, a=42)
        assert (output.token_ids, output.finish_reason, output.scheduled_s) == ([42], None, 7.0)

        plan = scheduler.schedule(now=8.0)
        (part,) = plan.scheduled
        assert shape(plan) == [("a", 5, 1, True)]
        assert part.token_ids == [42]
        assert not part.is_new
        assert not part.table_updates
        assert part.known_token_ids == [10, 11, 12, 13, 14, 42]
        (output,) = update(scheduler, plan, a=EOS)
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
        assert output.scheduled_s == 7.0
        assert not scheduler.has_work
        assert scheduler.schedule(now=9.0) is None
        assert scheduler.stats().kv_usage == 0

    def test_adds_a_block_when_the_last_block_is_full(self):
        scheduler = make_scheduler()
        add(scheduler, "a", num_prompt_tokens=3)
        update(scheduler, scheduler.schedule(0.0))
        grown = []
        for _ in range(6):
            plan = scheduler.schedule(0.0)
            part = plan.scheduled[0]
            grown.append(list(part.table_updates))
            update(scheduler, plan)
        assert grown == [[], [(0, 1, [2])], [], [], [], [(0, 2, [3])]]

    def test_a_long_prompt_runs_in_chunks_and_samples_after_the_last(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=20)
        shapes, outputs = [], []
        for _ in range(4):
            plan = scheduler.schedule(0.0)
            shapes += shape(plan)
            outputs += update(scheduler, plan)
        assert shapes == [
            ("a", 0, 8, False),
            ("a", 8, 8, False),
            ("a", 16, 4, True),
            ("a", 20, 1, True),
        ]
        assert len(outputs) == 2

    def test_running_requests_come_first_and_single_tokens_before_chunks(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=3)
        add(scheduler, "b", num_prompt_tokens=12)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 0, 3, True), ("b", 0, 5, False)]
        update(scheduler, plan)
        add(scheduler, "c", num_prompt_tokens=1)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 3, 1, True), ("b", 5, 7, True)]
        update(scheduler, plan)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 4, 1, True), ("b", 12, 1, True), ("c", 0, 1, True)]

    def test_decoding_requests_run_beside_a_prompt_of_higher_priority(self):
        scheduler = make_scheduler(max_num_batched_tokens=8, policy="priority")
        add(scheduler, "low", priority=9)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "high", num_prompt_tokens=40, priority=-9)
        update(scheduler, scheduler.schedule(0.0))
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("low", 4, 1, True), ("high", 7, 7, False)]

    def test_a_prompt_chunk_of_one_token_is_ordered_like_a_decode(self):
        scheduler = make_scheduler(max_num_batched_tokens=5)
        add(scheduler, "a", num_prompt_tokens=4)
        add(scheduler, "b", num_prompt_tokens=4)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("b", 0, 1, False), ("a", 0, 4, True)]
        outputs = scheduler.update(plan, StepResult([[42]]))
        assert [(o.request_id, o.token_ids) for o in outputs] == [("a", [42])]

    def test_only_requests_that_ask_get_logprobs(self):
        scheduler = make_scheduler()
        add(scheduler, "a")
        add(scheduler, "b", logprobs=1)
        plan = scheduler.schedule(0.0)
        logprobs = TokenLogprobs([5, 5], [-1.0, -1.0], 1)
        a, b = scheduler.update(plan, StepResult([[5], [5]], [None, [logprobs]]))
        assert a.logprobs is None
        assert b.logprobs == [logprobs]


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
        assert [output.embedding for output in outputs] == [[1.0]]

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


class TestPreemption:
    def make_full_scheduler(self, **sizes):
        """Fills the 4 blocks with a and b, 8 tokens each. Both need a third block next."""
        scheduler = make_scheduler(num_blocks=4 + 1, **sizes)
        add(scheduler, "a", "b", num_prompt_tokens=8)
        update(scheduler, scheduler.schedule(0.0), a=20, b=30)
        return scheduler

    def test_preempts_the_last_request_and_keeps_its_tokens(self):
        scheduler = self.make_full_scheduler()
        add(scheduler, "c", num_prompt_tokens=1)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 8, 1, True)]
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.total_preemptions) == (1, 2, 1)
        update(scheduler, plan, a=EOS)
        plan = scheduler.schedule(1.0)
        assert shape(plan) == [("c", 0, 1, True), ("b", 0, 9, True)]
        b = parts(plan)["b"]
        assert b.token_ids == [*range(10, 18), 30]
        assert b.is_new
        assert b.row == 0, "rows are assigned again, in the order of admission"
        assert b.num_prompt_tokens == 8
        output = update(scheduler, plan)[-1]
        assert (output.request_id, output.scheduled_s) == ("b", 0.0)

    def test_a_preempted_request_goes_to_the_head_of_the_queue(self):
        scheduler = self.make_full_scheduler()
        add(scheduler, "c", num_prompt_tokens=1)
        update(scheduler, scheduler.schedule(0.0))
        # b needs 3 blocks and 1 is free, so c waits behind b although c would fit.
        assert shape(scheduler.schedule(0.0)) == [("a", 9, 1, True)]

    def test_preempts_the_request_of_lowest_priority(self):
        scheduler = make_scheduler(num_blocks=6 + 1, policy="priority")
        for request_id, priority, arrival_s in [("a", 5, 0.0), ("b", 0, 1.0), ("c", 5, 2.0)]:
            add(
                scheduler,
                request_id,
                num_prompt_tokens=8,
                priority=priority,
                arrival_s=arrival_s,
            )
        update(scheduler, scheduler.schedule(0.0))
        plan = scheduler.schedule(0.0)
        # c, the later of the two of lowest priority, makes room for the others.
        assert shape(plan) == [("b", 8, 1, True), ("a", 8, 1, True)]
        assert scheduler.stats().total_preemptions == 1

    def test_admits_nothing_in_a_step_that_preempts(self):
        scheduler = make_scheduler(num_blocks=4 + 1, policy="priority")
        add(scheduler, "a", num_prompt_tokens=8, priority=0)
        add(scheduler, "b", num_prompt_tokens=8, priority=2)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "c", num_prompt_tokens=1, priority=1)
        # a takes one of b's two blocks. The other would be enough for c, which goes before b.
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 8, 1, True)]
        update(scheduler, plan)
        assert shape(scheduler.schedule(0.0)) == [("a", 9, 1, True), ("c", 0, 1, True)]

    def test_a_higher_priority_does_not_preempt_while_blocks_are_free(self):
        scheduler = make_scheduler(policy="priority")
        add(scheduler, "a", priority=5)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "b", priority=0)
        assert {p.request_id for p in scheduler.schedule(0.0).scheduled} == {"a", "b"}
        assert scheduler.stats().total_preemptions == 0

    def test_admits_higher_priorities_first(self):
        scheduler = make_scheduler(policy="priority", max_num_seqs=2)
        add(scheduler, "a", priority=1)
        add(scheduler, "b", priority=0, arrival_s=2.0)
        add(scheduler, "c", priority=0, arrival_s=1.0)
        assert [p.request_id for p in scheduler.schedule(0.0).scheduled] == ["c", "b"]

    def test_a_preempted_request_can_be_aborted(self):
        scheduler = self.make_full_scheduler()
        add(scheduler, "c", num_prompt_tokens=1)
        update(scheduler, scheduler.schedule(0.0))
        scheduler.abort(["b"])
        assert shape(scheduler.schedule(0.0)) == [("a", 9, 1, True), ("c", 0, 1, True)]


class TestAbort:
    def test_abort_removes_requests_and_frees_their_rows_and_blocks(self):
        scheduler = make_scheduler(max_num_seqs=2)
        add(scheduler, *"abcd")
        plan = scheduler.schedule(0.0)
        update(scheduler, plan)
        scheduler.abort(["a", "c", "nobody"])
        assert {i: p.row for i, p in parts(scheduler.schedule(0.0)).items()} == {"b": 1, "d": 0}
        scheduler.abort(["b", "d"])
        assert not scheduler.has_work
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)

    def test_drops_the_token_in_flight_of_an_aborted_request_whose_id_is_reused(self):
        scheduler = make_scheduler()
        add(scheduler, "a", "b")
        plan = scheduler.schedule(0.0)
        scheduler.abort(["a"])
        add(scheduler, "a", num_prompt_tokens=2)
        again = scheduler.schedule(0.0)
        assert shape(again) == [("b", 3, 1, True), ("a", 0, 2, True)]
        outputs = update(scheduler, plan, a=20, b=30)
        assert [(o.request_id, o.token_ids) for o in outputs] == [("b", [30])]
        outputs = update(scheduler, again, a=40, b=50)
        assert [(o.request_id, o.token_ids) for o in outputs] == [("b", [50]), ("a", [40])]


class TestTwoStepsInFlight:
    def test_plans_for_a_token_whose_id_only_the_device_knows(self):
        scheduler = make_scheduler()
        add(scheduler, "a")
        first = scheduler.schedule(0.0)
        assert first.scheduled[0].num_unknown_tokens == 0
        second = scheduler.schedule(0.0)
        assert shape(second) == [("a", 3, 1, True)]
        (part,) = second.scheduled
        assert part.token_ids == []
        assert part.num_unknown_tokens == 1
        assert part.known_token_ids == [10, 11, 12]
        update(scheduler, first, a=20)
        third = scheduler.schedule(0.0)
        (part,) = third.scheduled
        assert shape(third) == [("a", 4, 1, True)]
        assert part.token_ids == []
        assert part.num_unknown_tokens == 1
        assert part.known_token_ids == [10, 11, 12, 20]

    def test_does_not_schedule_a_request_past_max_tokens(self):
        scheduler = make_scheduler()
        add(scheduler, "a", max_tokens=2)
        first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
        assert len(second.scheduled) == 1
        update(scheduler, first)
        assert scheduler.schedule(0.0) is None
        (output,) = update(scheduler, second)
        assert output.finish_reason == FinishReason.LENGTH
        assert not scheduler.has_work

    def test_a_finished_request_frees_its_row_and_blocks_while_its_step_is_in_flight(self):
        scheduler = make_scheduler(max_num_seqs=1, num_blocks=2 + 1)
        add(scheduler, "a", num_prompt_tokens=3)
        add(scheduler, "b", num_prompt_tokens=7)
        first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
        (output,) = update(scheduler, first, a=EOS)
        assert output.finish_reason == FinishReason.STOP
        third = scheduler.schedule(0.0)
        (part,) = third.scheduled
        assert (part.request_id, part.row, part.is_new) == ("b", 0, True)
        ((group, start, block_ids),) = part.table_updates
        assert (group, start, sorted(block_ids)) == (0, 0, [1, 2])
        assert update(scheduler, second) == []
        assert [o.request_id for o in update(scheduler, third)] == ["b"]
        assert scheduler.stats().total_generation_tokens == 2

    def test_a_preempted_request_gets_its_token_in_flight(self):
        scheduler = make_scheduler(num_blocks=4 + 1)
        add(scheduler, "a", "b", num_prompt_tokens=8)
        first = scheduler.schedule(0.0)
        second = scheduler.schedule(0.0)
        assert shape(second) == [("a", 8, 1, True)]
        assert scheduler.stats().num_waiting == 1
        scheduler.abort(["a"])
        # There is room for b now, but its ninth token is not known yet.
        assert scheduler.schedule(0.0) is None
        (output,) = update(scheduler, first, b=30)
        assert (output.request_id, output.token_ids) == ("b", [30])
        third = scheduler.schedule(0.0)
        assert shape(third) == [("b", 0, 9, True)]
        assert third.scheduled[0].token_ids == [*range(10, 18), 30]
        assert update(scheduler, second) == []

    def test_a_preempted_request_can_end_with_its_token_in_flight(self):
        scheduler = make_scheduler(num_blocks=4 + 1)
        add(scheduler, "a", "b", num_prompt_tokens=8)
        first = scheduler.schedule(0.0)
        scheduler.schedule(0.0)
        outputs = update(scheduler, first, b=EOS)
        assert [o.finish_reason for o in outputs] == [None, FinishReason.STOP]
        assert scheduler.stats().num_waiting == 0

    def test_abort_drops_the_tokens_in_flight(self):
        scheduler = make_scheduler()
        add(scheduler, "a", "b")
        first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
        scheduler.abort(["a"])
        assert [o.request_id for o in update(scheduler, first)] == ["b"]
        assert [o.request_id for o in update(scheduler, second)] == ["b"]


class TestCacheGroups:
    """One group keeps all blocks, two have a window of 6 tokens. Blocks have 4 positions."""

    WINDOWS = (None, 6, 6)

    def held(self, scheduler):
        """Returns the number of blocks that each running request holds in each group."""
        return {
            request.id: [sum(block_id != 0 for block_id in table) for table in request.block_tables]
            for request in scheduler._running
        }

    def test_a_long_completion_holds_few_blocks_of_windowed_groups(self):
        scheduler = make_scheduler(windows=self.WINDOWS, num_blocks=60, max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=30)
        for num_tokens in range(30, 100):
            plan = scheduler.schedule(0.0)
            while not plan.sampling:
                update(scheduler, plan)
                # The window and a step of 8 tokens see 13 positions.
                assert max(self.held(scheduler)["a"][1:]) <= 4
                plan = scheduler.schedule(0.0)
            if num_tokens > 30:
                whole, *windowed = self.held(scheduler)["a"]
                assert whole == -(-num_tokens // 4)
                assert max(windowed) <= 3, "6 positions touch at most 3 blocks"
                assert scheduler.stats().kv_usage == pytest.approx((whole + sum(windowed)) / 59)
            update(scheduler, plan)
            if scheduler.has_work:
                scheduler.check_integrity()
        assert not scheduler.has_work

    def test_a_prompt_keeps_its_blocks_of_windowed_groups_until_its_end(self):
        """A completion takes every free block, and must not preempt the prompt before it."""
        windows = (None, 6)
        scheduler = make_scheduler(
            windows=windows, num_blocks=18, max_num_seqs=2, max_num_batched_tokens=4,
            policy="priority",
        )  # fmt: skip
        add(scheduler, "b", num_prompt_tokens=4, priority=1)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "a", num_prompt_tokens=40, priority=0)
        starts = []
        while not starts or starts[-1] < 40:
            plan = scheduler.schedule(0.0)
            starts += [part.start for part in plan.scheduled if part.request_id == "a"]
            scheduler.check_integrity()
            update(scheduler, plan)
        assert starts == sorted(starts), "a started again"
        assert starts.count(0) == 1

    def test_a_single_windowed_group_serves_contexts_larger_than_the_pool(self):
        scheduler = make_scheduler(windows=(6,), num_blocks=4 + 1, max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=50)
        outputs = []
        while scheduler.has_work:
            outputs += update(scheduler, scheduler.schedule(0.0))
        assert len(outputs) == 50
        assert scheduler.stats().total_preemptions == 0


def test_stats_count_steps_preemptions_and_tokens():
    scheduler = make_scheduler(num_blocks=4 + 1)
    add(scheduler, "a", "b", num_prompt_tokens=8, max_tokens=3)
    while scheduler.has_work:
        update(scheduler, scheduler.schedule(0.0))
    # Both are prefilled; b is preempted and a takes two steps to end; then b takes two.
    stats = scheduler.stats()
    assert stats.total_steps == 5
    assert stats.total_preemptions == 1
    assert stats.total_prompt_tokens == 16, "computing a prompt again does not count"
    assert stats.total_generation_tokens == 6
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


def test_stats_of_running_requests():
    scheduler = make_scheduler(num_blocks=10 + 1)
    add(scheduler, "a", num_prompt_tokens=5)
    add(scheduler, "b", num_prompt_tokens=36)
    scheduler.schedule(0.0)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.kv_usage == pytest.approx(0.2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda running: running[0].block_tables[0].pop(),
        lambda running: running[0].block_tables[0].append(running[1].block_tables[0][0]),
        lambda running: running[0].block_tables.append([]),
        lambda running: setattr(running[0], "row", 1),
        lambda running: setattr(running[0], "row", None),
        lambda running: running.reverse(),
        lambda running: running.pop(),
    ],
)
def test_check_integrity_detects_damage(damage):
    scheduler = make_scheduler()
    add(scheduler, "a", "b")
    update(scheduler, scheduler.schedule(0.0))
    scheduler.check_integrity()
    damage(scheduler._running)
    with pytest.raises(AssertionError):
        scheduler.check_integrity()


class TestDrafts:
    """With drafts in flight, positions are upper bounds until the result is known."""

    SPECULATION = Speculation(3, step_costs=((8, 1.0),))

    def decoding(self, **options):
        """Returns a scheduler whose request has computed its prompt of 4 tokens."""
        scheduler = make_scheduler(speculation=self.SPECULATION, max_num_seqs=8)
        add(scheduler, "a", num_prompt_tokens=4, **options)
        update(scheduler, scheduler.schedule(0.0))
        return scheduler

    def test_a_step_has_room_for_all_drafts_and_rejected_ones_are_computed_again(self):
        scheduler = self.decoding()
        plan = scheduler.schedule(0.0)
        (part,) = plan.scheduled
        assert (part.start, part.num_tokens, part.num_rows) == (4, 4, 4)
        assert (part.speculates, part.starts_speculation, part.num_drafts) == (True, True, 3)
        assert (part.token_ids, part.num_unknown_tokens) == ((), 0)
        assert plan.num_tokens == len(plan.rows) == 4
        (output,) = scheduler.update(plan, StepResult([[6, 7]], num_drafts=[3]))
        assert output.token_ids == [6, 7]
        (part,) = scheduler.schedule(0.0).scheduled
        assert (part.start, part.starts_speculation, part.num_unknown_tokens) == (6, False, 0)
        assert part.known_token_ids[-3:] == [OTHER, 6, 7]
        stats = scheduler.stats()
        assert (stats.total_drafts, stats.total_draft_tokens) == (1, 3)
        assert stats.accepted_per_position == (1, 0, 0)

    def test_the_next_step_is_planned_with_upper_bounds(self):
        scheduler = self.decoding()
        first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
        (part,) = second.scheduled
        assert (part.start, part.num_unknown_tokens, part.num_rows) == (8, 4, 4)
        scheduler.update(first, StepResult([[6]], num_drafts=[3]))
        scheduler.update(second, StepResult([[7, 8, 9]], num_drafts=[3]))
        (part,) = scheduler.schedule(0.0).scheduled
        assert part.known_token_ids[-5:] == [OTHER, 6, 7, 8, 9]
        assert (part.start, part.num_unknown_tokens) == (8, 0)

    def test_tokens_after_the_end_are_dropped(self):
        scheduler = self.decoding(stop_token_ids=(7,), logprobs=0)
        plan = scheduler.schedule(0.0)
        entries = [TokenLogprobs([token], [-1.0], 1) for token in (6, 7, 8)]
        (output,) = scheduler.update(plan, StepResult([[6, 7, 8]], [entries], num_drafts=[3]))
        assert output.token_ids == [6, 7]
        assert output.logprobs == entries[:2]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 7)
        assert scheduler.stats().total_generation_tokens == 3
        assert not scheduler.has_work

    def test_a_request_that_may_reach_its_limit_waits_for_its_tokens(self):
        scheduler = self.decoding(max_tokens=6)
        first = scheduler.schedule(0.0)
        assert first.scheduled[0].num_drafts == 3
        second = scheduler.schedule(0.0)
        assert second.scheduled[0].num_drafts == 0  # the last token, if all drafts stand
        assert scheduler.schedule(0.0) is None
        scheduler.update(first, StepResult([[6, 7]], num_drafts=[3]))
        scheduler.update(second, StepResult([[8]], num_drafts=[0]))
        (part,) = scheduler.schedule(0.0).scheduled
        assert (part.start, part.num_drafts) == (7, 1)

    def test_requests_get_no_drafts_where_the_host_must_know_their_tokens(self):
        for options in (
            {"presence_penalty": 0.5},
            {"bad_words_token_ids": ((5,),)},
            {"min_tokens": 3},
        ):
            plan = self.decoding(**options).schedule(0.0)
            assert not plan.speculates
            assert plan.scheduled[0].num_tokens == 1

    def test_drafts_take_no_row_of_a_waiting_request_and_no_block_of_a_running_one(self):
        scheduler = self.decoding()
        add(scheduler, *"bcdefgh", num_prompt_tokens=1)
        plan = scheduler.schedule(0.0)
        assert len(plan.scheduled) == len(plan.rows) == 8
        scheduler = make_scheduler(
            speculation=self.SPECULATION, max_num_seqs=8, num_blocks=3, max_model_len=8
        )
        add(scheduler, "a", "b", num_prompt_tokens=3, max_tokens=5)
        update(scheduler, scheduler.schedule(0.0))
        plan = scheduler.schedule(0.0)
        assert [part.num_rows for part in plan.scheduled] == [1, 1]
        assert scheduler.stats().total_preemptions == 0
