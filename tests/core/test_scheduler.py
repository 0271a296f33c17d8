"""Scheduler, plan by plan. test_scheduler_properties.py checks the tokens of random scenarios."""

import pytest

from jaxserve.core.plan import StepResult
from jaxserve.ipc.messages import FinishReason, TokenLogprobs
from jaxserve.testing.scheduling import EOS, OTHER, add, make_scheduler, parts, shape, update


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


class TestNumbersThatAreNotFinite:
    def test_the_request_ends_with_an_error_and_its_blocks_are_free(self):
        scheduler = make_scheduler()
        add(scheduler, "a", "b")
        plan = scheduler.schedule(1.0)
        result = StepResult([[], [OTHER]], not_finite={"a"})
        b, a = scheduler.update(plan, result)
        assert (a.request_id, a.token_ids, a.finish_reason) == ("a", [], FinishReason.ERROR)
        assert (a.error is not None, a.scheduled_s) == (True, 1.0)
        assert (b.request_id, b.token_ids, b.finish_reason) == ("b", [OTHER], None)
        assert parts(scheduler.schedule(2.0)).keys() == {"b"}
        scheduler.check_integrity()

    def test_a_chunk_of_a_prompt_can_fail(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=20, prompt_logprobs=0)
        plan = scheduler.schedule(0.0)
        entries = [TokenLogprobs([1], [float("nan")], 0)] * 8
        result = StepResult([], prompt_logprobs=[entries], not_finite={"a"})
        (output,) = scheduler.update(plan, result)
        assert output.finish_reason == FinishReason.ERROR
        assert not scheduler.has_work
        scheduler.check_integrity()

    def test_the_next_step_in_flight_and_requests_that_have_ended_are_ignored(self):
        scheduler = make_scheduler()
        add(scheduler, "a", "b")
        first = scheduler.schedule(0.0)
        second = scheduler.schedule(0.0)
        failed = StepResult([[], [EOS]], not_finite={"a"})
        assert len(scheduler.update(first, failed)) == 2
        assert scheduler.stats().total_corrupted == 1
        failed = StepResult([[], []], not_finite={"a", "b"})
        assert scheduler.update(second, failed) == []
        assert scheduler.stats().total_corrupted == 1
        assert not scheduler.has_work
        scheduler.check_integrity()

    def test_a_preempted_request_can_fail(self):
        scheduler = make_scheduler(num_blocks=4 + 1)
        add(scheduler, "a", "b", num_prompt_tokens=7)
        update(scheduler, scheduler.schedule(0.0))
        step = scheduler.schedule(0.0)
        scheduler.schedule(0.0)
        assert scheduler.stats().total_preemptions == 1
        outputs = scheduler.update(step, StepResult([[OTHER], []], not_finite={"b"}))
        assert [(o.request_id, o.finish_reason) for o in outputs] == [
            ("a", None),
            ("b", FinishReason.ERROR),
        ]
        assert scheduler.stats().num_waiting == 0
        scheduler.check_integrity()
