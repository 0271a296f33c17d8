"""How many drafts requests get: by the costs of steps, and by how their drafts did."""

import pytest

from jaxserve.core.speculation import DraftRecord, Speculation, assumed_costs, non_decreasing

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
