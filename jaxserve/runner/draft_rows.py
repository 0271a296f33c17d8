"""The rows of a step that hold draft tokens, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxserve.arrays import Leaf
from jaxserve.core.plan import StepPlan
from jaxserve.ops.attention import StepMeta


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftRows:
    """Which rows of a step speculate. R is the number of rows of the step, Q is max(1, R // 2).

    Attributes:
      engine_row: i32[R], in [0, S); S for padding and for rows whose inputs the host has filled.
      offset: i32[R], in [0, K]: 0 for the last token of a request, j for its draft number j.
      drafting: i32[Q], the engine rows that get drafts; padding S.
      request: i32[R], index into ``drafting`` where ``offset`` > 0, else 0.
    """

    engine_row: Int32[Leaf, " rows"]
    offset: Int32[Leaf, " rows"]
    drafting: Int32[Leaf, " requests"]
    request: Int32[Leaf, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedRows:
    """The rows of a step after drafts have been placed.

    Attributes:
      rows: which of them speculate.
      tokens: i32[R], the input token of each row that speculates.
      is_live: bool[R], false for drafts that the proposer did not make.
      next_positions: i32[R], the position of the token that each row samples.
    """

    rows: DraftRows
    tokens: Int32[Leaf, " rows"]
    is_live: Bool[Leaf, " rows"]
    next_positions: Int32[Leaf, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """The outcome of a step with drafts. N is the largest number of rows of any step.

    Attributes:
      tokens: i32[N], the token that each row drew; 0 after the rows of the step.
      is_accepted: bool[N], whether the token belongs to the request: all drafts of the request up
        to this row were accepted.
      is_live: bool[N], as in `PlacedRows`.
    """

    tokens: Int32[Leaf, " rows"]
    is_accepted: Bool[Leaf, " rows"]
    is_live: Bool[Leaf, " rows"]


def draft_rows(plan: StepPlan, num_rows: int, *, num_engine_rows: int) -> DraftRows:
    """Returns the rows of a plan that speculate, as numpy arrays padded to ``num_rows``."""
    engine_row = np.full(num_rows, num_engine_rows, np.int32)
    offset = np.zeros(num_rows, np.int32)
    request = np.zeros(num_rows, np.int32)
    drafting = np.full(max(1, num_rows // 2), num_engine_rows, np.int32)
    row = num_drafting = 0
    for part in plan.scheduled:
        end = row + part.num_rows
        if part.speculates:
            engine_row[row:end] = part.row
            offset[row:end] = np.arange(part.num_rows)
        if part.num_drafts:
            request[row:end] = num_drafting
            drafting[num_drafting] = part.row
            num_drafting += 1
        row = end
    arrays: dict[str, Any] = {
        "engine_row": engine_row,
        "offset": offset,
        "drafting": drafting,
        "request": request,
    }
    return DraftRows(**arrays)


def place_rows(
    meta: StepMeta,
    positions: Int32[Array, " rows"],
    is_live: Bool[Array, " rows"],
    *,
    block_size: int,
    num_slots: int,
) -> StepMeta:
    """Moves the only token of some rows to another position of their request.

    Args:
      meta: of a step. The block tables cover the positions.
      positions: i32[R], for each row to move; -1 for the others.
      is_live: bool[R]. A row to move that is not live writes nothing; it reads position 0.
      block_size, num_slots: of the cache.
    """
    moves = positions >= 0
    is_written = moves & is_live
    positions = jnp.where(is_written, positions, 0)
    num_rows = len(positions)
    block = meta.block_tables[:, jnp.arange(num_rows), positions // block_size]
    slots = jnp.where(is_written, block * block_size + positions % block_size, num_slots)
    # These rows come first and have one token each, so row r has token r.
    first = slice(num_rows)
    return replace(
        meta,
        positions=meta.positions.at[first].set(jnp.where(moves, positions, meta.positions[first])),
        slots=meta.slots.at[:, first].set(jnp.where(moves, slots, meta.slots[:, first])),
        seq_lens=jnp.where(moves, positions + 1, meta.seq_lens),
    )
