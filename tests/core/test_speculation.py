"""How many drafts requests get: by the costs of steps, and by how their drafts did."""

import pytest

from jaxserve.core.plan import StepResult
from jaxserve.core.speculation import DraftRecord, Speculation, assumed_costs, non_decreasing
from jaxserve.ipc.messages import FinishReason, TokenLogprobs
from jaxserve.testing.scheduling import OTHER, add, make_scheduler, update

FLAT = tuple((rows, 1.0) for rows in (2, 4, 8, 16))
LINEAR = tuple((rows, float(rows)) for rows in (2, 4, 8, 16))


def record(*, accepted=0, rejected=0, of=4):
    """A record after steps with all drafts accepted, then steps with none."""
    result = DraftRecord()
    for _ in range(accepted):
        result.add(of, of)
    for _ in range(rejected):
        result.add(of, 0)
    return result


def test_free_rows_are_filled():
    settings = Speculation(4, FLAT)
    assert settings.num_drafts([DraftRecord()], num_rows=1, most=99) == [4]
    assert settings.num_drafts([DraftRecord()], num_rows=1, most=2) == [2]
    assert settings.num_drafts([DraftRecord()], num_rows=1, most=0) == [0]
    assert settings.num_drafts([DraftRecord()] * 8, num_rows=8, most=99) == [1] * 8
    assert settings.num_drafts([DraftRecord()] * 16, num_rows=16, most=99) == [0] * 16
    assert settings.num_drafts([], num_rows=3, most=99) == []


def test_rows_that_cost_as_much_as_tokens_are_not_added():
    """With two rows as the smallest step, the first draft of a single request is free."""
    settings = Speculation(4, LINEAR)
    assert settings.num_drafts([DraftRecord()], num_rows=1, most=99) == [1]
    assert settings.num_drafts([DraftRecord()] * 2, num_rows=2, most=99) == [0, 0]
    assert settings.num_drafts([record(accepted=9)] * 8, num_rows=8, most=99) == [0] * 8


def test_the_most_promising_requests_get_the_rows():
    settings = Speculation(4, FLAT)
    good, bad = record(accepted=3), record(rejected=3)
    assert settings.num_drafts([bad, good, bad], num_rows=3, most=4) == [0, 4, 0]
    assert settings.num_drafts([bad, good], num_rows=2, most=7) == [3, 4]
    slow = Speculation(4, ((2, 1.0), (4, 1.5), (8, 2.0)))
    assert slow.num_drafts([record(accepted=3)], num_rows=1, most=99) == [3]
    assert slow.num_drafts([record(rejected=9)], num_rows=1, most=99) == [1]
    assert slow.num_drafts([record(rejected=9)] * 2, num_rows=2, most=99) == [0, 0]


def test_a_request_is_tried_again_after_some_steps():
    settings = Speculation(4, ((2, 1.0), (8, 1.5)))
    rejected = record(rejected=9)
    steps = 0
    while settings.num_drafts([rejected, record(rejected=99)], num_rows=2, most=99)[0] == 0:
        rejected.skip()
        steps += 1
        assert steps < 200
    assert steps > 10


def test_the_estimate_stays_between_0_and_1_and_follows_the_last_steps():
    drafts = DraftRecord()
    first = drafts.probability
    drafts.add(4, 4)
    assert first < drafts.probability < 1
    for _ in range(1000):
        drafts.add(4, 4)
    assert 0.95 < drafts.probability < 1
    for _ in range(1000):
        drafts.add(4, 0)
    assert 0 <= drafts.probability < 0.01
    for _ in range(1000):
        drafts.skip()
    assert drafts.probability == pytest.approx(first, abs=0.01)
    with pytest.raises(AssertionError):
        drafts.add(2, 3)


def test_measured_costs_never_fall():
    assert non_decreasing([(2, 3.0), (4, 2.0), (8, 5.0)]) == ((2, 2.0), (4, 2.0), (8, 5.0))
    costs = assumed_costs(12)
    assert [rows for rows, _ in costs] == [2, 4, 8, 12]
    assert non_decreasing(costs) == costs
    assert [rows for rows, _ in assumed_costs(2)] == [2]


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
        entries = [TokenLogprobs((token,), (-1.0,), 1) for token in (6, 7, 8)]
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
