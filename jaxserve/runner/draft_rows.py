"""The rows of a step that hold draft tokens: which they are, how they are filled and verified."""

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
from jaxserve.runner.batch import StepInputs
from jaxserve.sampling.inputs import LastTokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStore:
    """The tokens of the requests that speculate. H is at least the longest context.

    Attributes:
      tokens: i32[S, H], prompt and output of each engine row; garbage after the last token.
      num_tokens: i32[S], tokens of each engine row; garbage for rows that do not speculate.
    """

    tokens: Int32[Leaf, "engine_rows length"]
    num_tokens: Int32[Leaf, " engine_rows"]


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
      tokens: i32[N], the token that each row drew, marked if its logits are not finite; see
        `sampling.finite`. 0 after the rows of the step.
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


def place_drafts(
    inputs: StepInputs,
    store: TokenStore,
    rows: DraftRows,
    drafts: Int32[Array, "requests drafts"],
    num_drafts: Int32[Array, " requests"],
    *,
    block_size: int,
    num_slots: int,
) -> tuple[StepInputs, PlacedRows]:
    """Fills the inputs of the rows that speculate.

    Args:
      inputs: of a step.
      store: the tokens of the requests.
      rows: which rows speculate.
      drafts, num_drafts: what the proposer returned for ``rows.drafting``.
      block_size, num_slots: of the cache.
    """
    num_engine_rows = len(store.num_tokens)
    speculates = rows.engine_row < num_engine_rows
    engine_row = jnp.minimum(rows.engine_row, num_engine_rows - 1)
    last = store.num_tokens[engine_row] - 1
    is_draft = rows.offset > 0
    tokens = jnp.where(
        is_draft,
        drafts[rows.request, jnp.maximum(rows.offset - 1, 0)],
        store.tokens[engine_row, last],
    )
    is_live = ~is_draft | (rows.offset <= num_drafts[rows.request])
    meta = move_rows(
        inputs.meta,
        jnp.where(speculates, last + rows.offset, -1),
        is_live,
        block_size=block_size,
        num_slots=num_slots,
    )
    first = slice(len(rows.offset))  # see `move_rows`
    own = jnp.where(speculates, jnp.where(is_live, tokens, 0), inputs.tokens[first])
    placed = replace(inputs, tokens=inputs.tokens.at[first].set(own), meta=meta)
    return placed, PlacedRows(rows, tokens, is_live, meta.seq_lens)


def accept_drafts(
    store: TokenStore,
    last_tokens: LastTokens,
    placed: PlacedRows,
    drawn: Int32[Array, " rows"],
) -> tuple[TokenStore, LastTokens, Bool[Array, " rows"]]:
    """Accepts the drafts of each request up to the first that differs from the drawn token.

    Args:
      store: the tokens of the requests before the step.
      last_tokens: i32[S], the last token of each engine row.
      placed: the rows of the step.
      drawn: i32[R], the token that each row drew.

    Returns:
      (the tokens of the requests after the step, the last tokens, `Verified.is_accepted` bool[R]).
    """
    num_engine_rows = len(store.num_tokens)
    engine_row, offset = placed.rows.engine_row, placed.rows.offset
    before = jnp.concatenate([drawn[:1], drawn[:-1]])
    is_hit = placed.is_live & (placed.tokens == before)
    misses = jnp.cumsum((offset > 0) & ~is_hit)
    is_accepted = misses == misses[jnp.arange(len(offset)) - offset]
    goes_on = jnp.concatenate([is_accepted[1:] & (offset[1:] > 0), jnp.array([False])])
    kept = jnp.where(is_accepted, engine_row, num_engine_rows)
    positions = store.num_tokens.at[engine_row].get(mode="clip") + offset
    last = jnp.where(is_accepted & ~goes_on, engine_row, num_engine_rows)
    store = TokenStore(
        store.tokens.at[kept, positions].set(drawn, mode="drop"),
        store.num_tokens.at[kept].add(1, mode="drop"),
    )
    return store, last_tokens.at[last].set(drawn, mode="drop"), is_accepted


def move_rows(
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
      is_live: bool[R]. If false, a moved row writes nothing and reads position 0.
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
