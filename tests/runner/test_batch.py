"""Batches: the arrays of a step and their padding."""

import dataclasses

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxserve.core.plan import ScheduledRequest, StepPlan, TableUpdate
from jaxserve.runner.batch import BatchBuilder
from jaxserve.runner.buckets import Bucket
from jaxserve.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 4, 20, 6
NUM_SLOTS = BLOCK_SIZE * NUM_BLOCKS


def part(row, start, tokens, *, blocks=(), offset=0, samples=True) -> ScheduledRequest:
    """Returns a part of a plan. ``tokens`` is None for one token that only the device knows."""
    return ScheduledRequest(
        request_id=str(row), row=row, is_new=False, start=start,
        num_tokens=1 if tokens is None else len(tokens), token_ids=tokens or [],
        table_updates=[TableUpdate(0, offset, list(blocks))], samples=samples,
        params=SamplingParams(seed=0), eos_token_id=None, num_prompt_tokens=1, known_token_ids=[],
    )  # fmt: skip


def make_builder() -> BatchBuilder:
    return BatchBuilder(
        num_rows=NUM_ROWS, table_width=8, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )


def test_builds_the_arrays_of_a_mixed_step():
    builder = make_builder()
    first = StepPlan(0, (part(4, 0, [7] * 5, blocks=[9, 3]), part(1, 0, [8] * 4, blocks=[5])))
    builder.build(first, Bucket(16, 4, 8))
    second = StepPlan(
        1,
        (
            part(4, 5, None),
            part(1, 4, [11], blocks=[6], offset=1),
            part(0, 2, [21, 22, 23], blocks=[2, 12], samples=False),
        ),
    )
    inputs = builder.build(second, Bucket(8, 4, 2))
    assert inputs.tokens.tolist() == [0, 11, 21, 22, 23, 0, 0, 0]
    assert inputs.fed_from_row.tolist() == [4, -1, -1, -1, -1, -1, -1, -1]
    assert inputs.logit_tokens.tolist() == [0, 1, 4, 0]
    assert inputs.kept_in_row.tolist() == [4, 1, NUM_ROWS, NUM_ROWS]
    meta = inputs.meta.of(0)
    assert not meta.decode_only
    assert meta.positions.tolist() == [5, 4, 2, 3, 4, 0, 0, 0]
    slots = [3 * 4 + 1, 6 * 4, 2 * 4 + 2, 2 * 4 + 3, 12 * 4]
    assert meta.slots.tolist() == slots + [NUM_SLOTS] * 3
    assert meta.block_tables[:3].tolist() == [[9, 3], [5, 6], [2, 12]]
    assert meta.seq_lens.tolist() == [6, 5, 5, 0]
    assert meta.query_start.tolist() == [0, 1, 2, 5, 5]
    assert {leaf.dtype for leaf in (inputs.tokens, inputs.logit_tokens, meta.slots)} == {
        np.dtype("int32")
    }


def test_every_group_of_layers_has_its_own_slots_and_block_tables():
    builder = BatchBuilder(
        num_rows=NUM_ROWS, table_width=8, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_groups=2
    )
    first = part(3, 0, [7] * 7, blocks=[9, 3])
    first = msgspec.structs.replace(
        first, table_updates=[TableUpdate(0, 0, [9, 3]), TableUpdate(1, 0, [5, 6])]
    )
    builder.build(StepPlan(0, (first,)), Bucket(8, 2, 8))
    second = msgspec.structs.replace(
        part(3, 7, [8, 8]),
        table_updates=[TableUpdate(1, 0, [0]), TableUpdate(0, 2, [2]), TableUpdate(1, 2, [4])],
    )
    meta = builder.build(StepPlan(1, (second,)), Bucket(4, 2, 3)).meta
    assert meta.block_tables[:, 0].tolist() == [[9, 3, 2], [0, 6, 4]]
    assert meta.slots.tolist() == [
        [3 * 4 + 3, 2 * 4, NUM_SLOTS, NUM_SLOTS],
        [6 * 4 + 3, 4 * 4, NUM_SLOTS, NUM_SLOTS],
    ]
    for group in range(2):
        own = meta.of(group)
        np.testing.assert_array_equal(own.slots, meta.slots[group])
        np.testing.assert_array_equal(own.block_tables, meta.block_tables[group])
        np.testing.assert_array_equal(meta.of(jnp.int32(group)).slots, own.slots)


def test_keeps_no_token_of_a_row_that_the_sampler_fills():
    plan = StepPlan(0, (part(1, 0, [1], blocks=[5]), part(3, 0, [1], blocks=[6])))
    inputs = make_builder().build(plan, Bucket(2, 2, 8), to_sample={0})
    assert inputs.kept_in_row.tolist() == [NUM_ROWS, 3]


def test_an_empty_plan_writes_no_slots_and_keeps_no_tokens():
    inputs = make_builder().build(StepPlan(0, ()), Bucket(2, 2, 8))
    assert inputs.meta.decode_only
    assert inputs.meta.slots.tolist() == [[NUM_SLOTS] * 2]
    assert inputs.meta.seq_lens.tolist() == [0, 0]
    assert inputs.kept_in_row.tolist() == [NUM_ROWS] * 2
    assert inputs.fed_from_row.tolist() == [-1, -1]


def test_a_later_step_does_not_change_the_arrays_of_an_earlier_step():
    builder = make_builder()
    plan = StepPlan(0, (part(0, 0, [1, 2, 3, 4], blocks=[5]),))
    before = builder.build(plan, Bucket(8, 2, 8))
    copy = dataclasses.replace(before.meta, block_tables=before.meta.block_tables.copy())
    builder.build(StepPlan(1, (part(0, 0, [9], blocks=[17]),)), Bucket(2, 2, 8))
    np.testing.assert_array_equal(before.meta.block_tables, copy.block_tables)
