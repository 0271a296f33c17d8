"""Rows with drafts: where they are placed, and which of them are accepted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.plan import ScheduledRequest, StepPlan, TableUpdate
from jaxserve.runner.batch import BatchBuilder
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.draft_rows import (
    PlacedRows,
    TokenStore,
    accept_drafts,
    draft_rows,
    place_drafts,
)
from jaxserve.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS, LENGTH = 4, 30, 6, 24
NUM_SLOTS = BLOCK_SIZE * NUM_BLOCKS


def part(row, start, num_tokens=1, *, drafts=None, tokens=(), tables=()) -> ScheduledRequest:
    """Returns a part of a plan. It speculates if ``drafts`` is a number."""
    speculates = drafts is not None
    return ScheduledRequest(
        request_id=str(row), row=row, is_new=False, start=start,
        num_tokens=1 + drafts if speculates else num_tokens, token_ids=list(tokens),
        table_updates=[TableUpdate(group, 0, blocks) for group, blocks in enumerate(tables)],
        samples=True, params=SamplingParams(seed=0), eos_token_id=None, num_prompt_tokens=1,
        known_token_ids=[], speculates=speculates, num_drafts=drafts or 0,
    )  # fmt: skip


def test_places_drafts_at_the_positions_that_the_device_knows():
    """Two groups of layers; the host has planned with positions that are too large."""
    plan = StepPlan(
        0,
        (
            part(4, 9, drafts=2, tables=([11, 12, 13], [21, 22, 23])),
            part(1, 6, tokens=[77], tables=([14, 15], [24, 25])),
            part(2, 7, drafts=0, tables=([16, 17], [26, 27])),
            part(0, 0, 3, tokens=[50, 51, 52], tables=([18], [28])),
        ),
        speculates=True,
    )
    builder = BatchBuilder(
        num_rows=NUM_ROWS, table_width=6, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_groups=2
    )
    inputs = jax.tree.map(jnp.asarray, builder.build(plan, Bucket(10, 8, 6)))
    rows = draft_rows(plan, 8, num_engine_rows=NUM_ROWS)
    assert rows.engine_row.tolist() == [4, 4, 4, 6, 2, 6, 6, 6]
    assert rows.offset.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert rows.drafting.tolist() == [4, 6, 6, 6]
    tokens = np.arange(NUM_ROWS * LENGTH, dtype=np.int32).reshape(NUM_ROWS, LENGTH)
    store = TokenStore(jnp.array(tokens), jnp.array([0, 0, 5, 0, 8, 0]))
    drafts = jnp.array([[31, 32], [0, 0], [0, 0], [0, 0]])
    place = jax.jit(place_drafts, static_argnames=("block_size", "num_slots"))
    placed_inputs, placed = place(
        inputs, store, jax.tree.map(jnp.asarray, rows), drafts, jnp.array([1, 0, 0, 0]),
        block_size=BLOCK_SIZE, num_slots=NUM_SLOTS,
    )  # fmt: skip
    assert placed.is_live.tolist() == [True, True, False, True, True, True, True, True]
    last = [tokens[4, 7], tokens[2, 4]]
    assert placed_inputs.tokens.tolist() == [last[0], 31, 0, 77, last[1], 50, 51, 52, 0, 0]
    meta = placed_inputs.meta
    assert meta.positions.tolist() == [7, 8, 0, 6, 4, 0, 1, 2, 0, 0]
    assert meta.seq_lens.tolist() == [8, 9, 1, 7, 5, 3, 0, 0]
    assert placed.next_positions.tolist() == meta.seq_lens.tolist()
    for group, first in enumerate((10, 20)):
        slots = [(first + 2) * 4 + 3, (first + 3) * 4, NUM_SLOTS, (first + 5) * 4 + 2]
        slots += [(first + 7) * 4, *((first + 8) * 4 + i for i in range(3)), NUM_SLOTS, NUM_SLOTS]
        assert meta.slots[group].tolist() == slots
    unchanged = {"logit_tokens", "kept_in_row", "fed_from_row"}
    for name in unchanged:
        np.testing.assert_array_equal(getattr(placed_inputs, name), getattr(inputs, name))
    assert inputs.kept_in_row.tolist() == [6, 6, 6, 1, 6, 0, 6, 6]
    np.testing.assert_array_equal(meta.block_tables, inputs.meta.block_tables)
    np.testing.assert_array_equal(meta.query_start, [0, 1, 2, 3, 4, 5, 8, 8, 8])


def accept_one_by_one(tokens, num_tokens, last_tokens, plan, placed, drawn):
    """Returns the results of `accept_drafts`, from loops over requests and drafts."""
    accepted, row = np.ones(len(drawn), bool), 0
    for each in plan.scheduled:
        if each.speculates:
            stands = True
            for j in range(each.num_rows):
                if j > 0:
                    hit = placed.is_live[row + j] and placed.tokens[row + j] == drawn[row + j - 1]
                    stands = stands and bool(hit)
                accepted[row + j] = stands
                if stands:
                    tokens[each.row, num_tokens[each.row]] = drawn[row + j]
                    num_tokens[each.row] += 1
                    last_tokens[each.row] = drawn[row + j]
        row += each.num_rows
    return accepted


@pytest.mark.parametrize("seed", range(20))
def test_accepts_what_a_loop_accepts(seed):
    rng = np.random.default_rng(seed)
    engine_rows = rng.permutation(NUM_ROWS)[:4].tolist()
    kinds = [3, 0, 2, None]
    parts = [part(row, 9, drafts=kind) for row, kind in zip(engine_rows, kinds, strict=True)]
    plan = StepPlan(0, tuple(parts), speculates=True)
    num_rows = 12
    rows = draft_rows(plan, num_rows, num_engine_rows=NUM_ROWS)
    drawn = rng.integers(0, 2, num_rows).astype(np.int32)
    placed = PlacedRows(
        rows,
        rng.integers(0, 2, num_rows).astype(np.int32),
        (rows.offset == 0) | (rng.random(num_rows) < 0.8),
        np.zeros(num_rows, np.int32),
    )
    tokens = rng.integers(5, 9, (NUM_ROWS, LENGTH)).astype(np.int32)
    num_tokens = rng.integers(1, LENGTH - 4, NUM_ROWS).astype(np.int32)
    last_tokens = rng.integers(5, 9, NUM_ROWS).astype(np.int32)
    store, last, accepted = jax.jit(accept_drafts)(
        TokenStore(tokens, num_tokens), last_tokens, placed, drawn
    )
    expected = [array.copy() for array in (tokens, num_tokens, last_tokens)]
    wanted = accept_one_by_one(*expected, plan, placed, drawn)
    np.testing.assert_array_equal(accepted, wanted)
    for found, array in zip((store.tokens, store.num_tokens, last), expected, strict=True):
        np.testing.assert_array_equal(found, array)


def test_rows_without_drafts_are_padding():
    rows = draft_rows(StepPlan(0, ()), 2, num_engine_rows=NUM_ROWS)
    arrays = dataclasses.asdict(rows)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "engine_row": [NUM_ROWS] * 2, "offset": [0, 0], "drafting": [NUM_ROWS], "request": [0, 0],
    }  # fmt: skip
