"""Places and verifies draft tokens on the device, around a step that knows nothing of them.

    place:   the tokens so far -> drafts -> the inputs of the rows that speculate
    step:    logits of every row
    sampler: the token that each row draws at its position
    accept:  a draft is accepted if it equals the token that the row before it drew and all drafts
             before it were accepted

Each draft is a row of its own with one token, so a step with drafts looks like a step with more
requests: it runs the same program, and the same attention as without drafts. The token of a row is
a function of seed, position and context, so accepted tokens are those that plain steps would give.

Positions depend on how many drafts an earlier step has accepted, which the host learns one step
late. So lengths and tokens of these requests live on the device, and the host plans with upper
bounds. Keys and values of rejected drafts lie behind the length, and the next step overwrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.core.plan import ScheduledRequest, Sizes, StepPlan
from jaxserve.runner.buckets import Bucket, powers_of_two
from jaxserve.runner.draft_rows import (
    DraftRows,
    PlacedRows,
    TokenStore,
    Verified,
    accept_drafts,
    draft_rows,
    place_drafts,
)
from jaxserve.runner.jit import CompilationLog, Packed, Program, pack
from jaxserve.runner.proposer import ProposeFn
from jaxserve.sampling.finite import marked, without_marks
from jaxserve.sampling.inputs import LastTokens

MIN_START = 1024
"""Tokens of the shortest transfer that starts a request."""


class Speculator:
    """Holds the tokens of requests on the device, and runs the programs around a step.

    Args:
      propose: the proposer.
      sizes: of the engine. S is ``max_num_seqs``, N ``max_num_rows``, K ``max_drafts``, and H
        ``max_model_len``.
      log: receives the compilations.
      sharding: the devices of the last tokens; None: the default device of jax.
    """

    def __init__(
        self,
        propose: ProposeFn,
        sizes: Sizes,
        *,
        log: CompilationLog,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        num_rows, max_model_len = sizes.max_num_seqs, sizes.max_model_len
        self._num_rows = num_rows
        self._sharding = sharding
        self._start_sizes = powers_of_two(min(MIN_START, max_model_len), max_model_len)
        self._store = TokenStore(
            jnp.zeros((num_rows, max_model_len), jnp.int32, device=sharding),
            jnp.zeros(num_rows, jnp.int32, device=sharding),
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def start_step(store: TokenStore, last_tokens: LastTokens, packed: Packed) -> TokenStore:
            tokens, row, count, is_unknown = packed.unpack()
            known = store.tokens.at[row, : len(tokens)].set(tokens, mode="drop")
            place = jnp.where(is_unknown, count, max_model_len)  # the end drops the token
            return TokenStore(
                known.at[row, place].set(last_tokens[row], mode="drop"),
                store.num_tokens.at[row].set(count + is_unknown, mode="drop"),
            )

        @jax.jit
        def place_step(
            store: TokenStore, packed: Packed, packed_rows: Packed
        ) -> tuple[Packed, PlacedRows]:
            rows: DraftRows = packed_rows.unpack()
            drafting = jnp.minimum(rows.drafting, num_rows - 1)
            proposed = propose(
                store.tokens[drafting], store.num_tokens[drafting], num_drafts=sizes.max_drafts
            )
            inputs, placed = place_drafts(
                packed.unpack(),
                store,
                rows,
                *proposed,
                block_size=sizes.block_size,
                num_slots=sizes.num_blocks * sizes.block_size,
            )
            return packed.replaced(inputs), placed

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def accept_step(
            store: TokenStore,
            last_tokens: LastTokens,
            placed: PlacedRows,
            drawn: Int32[Array, " rows"],
            sampled: Int32[Array, " a"] | None,
            indices: Int32[Array, " a"] | None,
        ) -> tuple[TokenStore, LastTokens, Verified]:
            is_finite = drawn >= 0
            drawn = without_marks(drawn)
            if sampled is not None:
                drawn = drawn.at[indices].set(sampled, mode="drop")
            store, last_tokens, is_accepted = accept_drafts(store, last_tokens, placed, drawn)
            padding = (0, sizes.max_num_rows - len(drawn))
            columns = (marked(drawn, is_finite), is_accepted, placed.is_live)
            return store, last_tokens, Verified(*(jnp.pad(column, padding) for column in columns))

        self._start = Program("starting to speculate", start_step, log)
        self._place = Program("placing drafts", place_step, log)
        self._accept = Program("accepting drafts", accept_step, log)

    def start(self, part: ScheduledRequest, last_tokens: LastTokens) -> None:
        """Stores the tokens of a request whose step is the first to speculate."""
        self._start_row(part.row, part.known_token_ids, part.num_unknown_tokens, last_tokens)

    def place(self, plan: StepPlan, bucket: Bucket, packed: Packed) -> tuple[Packed, PlacedRows]:
        """Fills the inputs of the rows that speculate, without waiting for the device.

        Args:
          plan: the plan of the step.
          bucket: holds the plan.
          packed: the packed `StepInputs` of the plan.

        Returns:
          (the packed inputs, what `accept` needs).
        """
        rows = pack(draft_rows(plan, bucket.num_rows, num_engine_rows=self._num_rows))
        return self._place(self._store, packed, rows, shapes=bucket)

    def accept(
        self,
        placed: PlacedRows,
        most_likely: Int32[Array, " rows"],
        sampled: Int32[Array, " a"] | None,
        indices: Sequence[int],
        last_tokens: LastTokens,
    ) -> tuple[LastTokens, Verified]:
        """Verifies the drafts of a step, without waiting for the device.

        Args:
          placed: returned by `place`.
          most_likely: i32[R], as in `Forward`.
          sampled: i32[A], the tokens that replace it in the rows ``indices``, then padding; None if
            there are none.
          indices: indices in [0, R) of the first entries of ``sampled``.
          last_tokens: i32[S], the last token of each engine row; donated.

        Returns:
          (the last tokens including the new ones, the outcome).
        """
        padded = None
        num_rows, shapes = len(most_likely), f"{len(most_likely)} rows"
        if sampled is not None:
            padded = np.full(len(sampled), num_rows, np.int32)
            padded[: len(indices)] = indices
            shapes += f", {len(sampled)} sampled"
        self._store, last_tokens, verified = self._accept(
            self._store, last_tokens, placed, most_likely, sampled, padded, shapes=shapes
        )
        return last_tokens, verified

    def warm_ups(
        self, step_sizes: Iterable[int], sampled_sizes: Sequence[int]
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the name of each program but that of `place`, and a function that compiles it.

        Args:
          step_sizes: the numbers of rows that a step may have.
          sampled_sizes: the numbers of rows that the sampler may have, ascending.
        """
        for size in self._start_sizes:
            name = f"starting to speculate with {size} tokens"
            yield name, functools.partial(self._start_row, self._num_rows, [0] * size, 0, None)
        for step_size in sorted(step_sizes):
            yield f"drafts in {step_size} rows", functools.partial(self._warm_up, step_size, None)
            for size in sampled_sizes:
                name = f"drafts in {step_size} rows, {size} sampled"
                yield name, functools.partial(self._warm_up, step_size, size)
                if size >= step_size:
                    break

    def _start_row(
        self, row: int, known: Sequence[int], num_unknown: int, last_tokens: LastTokens | None
    ) -> None:
        """Stores the tokens of an engine row; row S stores nothing."""
        if last_tokens is None:
            last_tokens = self._no_tokens()
        size = next(size for size in self._start_sizes if size >= len(known))
        tokens = np.zeros(size, np.int32)
        tokens[: len(known)] = known
        numbers = (np.array(number, np.int32) for number in (row, len(known), num_unknown))
        packed = pack((tokens, *numbers))
        self._store = self._start(self._store, last_tokens, packed, shapes=f"{size} tokens")

    def _warm_up(self, num_rows: int, num_sampled: int | None) -> Verified:
        rows = draft_rows(StepPlan(-1, ()), num_rows, num_engine_rows=self._num_rows)
        nothing = self._zeros(num_rows)
        is_live = jnp.zeros(num_rows, bool, device=self._sharding)
        placed = PlacedRows(jax.device_put(rows, self._sharding), nothing, is_live, nothing)
        sampled = None if num_sampled is None else self._zeros(num_sampled)
        return self.accept(placed, nothing, sampled, (), self._no_tokens())[1]

    def _no_tokens(self) -> LastTokens:
        return self._zeros(self._num_rows)

    def _zeros(self, size: int) -> Int32[Array, " n"]:
        return jnp.zeros(size, jnp.int32, device=self._sharding)
