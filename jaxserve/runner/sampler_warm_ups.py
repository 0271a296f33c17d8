"""Compiles the programs of the sampler before the first request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.runner.sampling_batch import SamplingNeeds
from jaxserve.runner.sampling_work import NO_REQUESTS
from jaxserve.runner.token_sampler import TokenSampler
from jaxserve.sampling.inputs import Filters, LastTokens, SamplingInputs
from jaxserve.sampling.logprobs import logprobs_size
from jaxserve.sampling.stages import Logits


class SamplerWarmUps:
    """Runs the common programs of a sampler on padding."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler

    def programs(
        self, step_sizes: Iterable[int], *, num_drawn: int | None = None
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the name of each common program and a function that compiles it by running it.

        Args:
          step_sizes: the numbers of rows of logits that a step may have.
          num_drawn: the length of `Verified.tokens`, if the engine speculates.
        """
        step_sizes = set(step_sizes)
        if num_drawn is not None:
            yield from self._of_drafts(step_sizes, num_drawn)
        for step_size in sorted(
            {*step_sizes, *(self._sampler.sizes if self._sampler.scores_processed else ())}
        ):
            for size in self._sampler.sizes:
                name = f"{size} of {step_size} rows"
                yield name, functools.partial(self._warm_up_rows, step_size, size)
                if size >= step_size:
                    break
        for size in self._sampler.sizes:
            name = f"masks of {size} rows"
            yield name, functools.partial(self._warm_up_processing, size, has_masks=True)
            name = f"token lists of {size} rows"
            yield name, functools.partial(self._warm_up_processing, size, has_masks=False)
            for filters in (Filters.NONE, Filters.SMALL_TOP_K):
                name = f"sampling of {size} rows, {filters.value}"
                yield name, functools.partial(self._warm_up_sampling, size, filters)
            name = f"log probabilities of {size} rows"
            yield name, functools.partial(self._warm_up_scores, size, self._sampler.num_rows)
        yield from self._sampler.stages.warm_ups(
            self._sampler.sizes, self._no_logits, self._no_inputs, self._no_tokens()
        )

    def _of_drafts(
        self, step_sizes: Iterable[int], num_drawn: int
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the programs that only plans with drafts run; see `programs`."""
        for step_size in sorted(step_sizes):
            for size in self._sampler.sizes:
                name = f"{size} of {step_size} rows, with positions"
                yield name, functools.partial(self._warm_up_placed_rows, step_size, size)
                if size >= step_size:
                    break
        for size in self._sampler.sizes:
            for filters in (Filters.NONE, Filters.SMALL_TOP_K):
                name = f"sampling of {size} rows, {filters.value}, positions from the device"
                positions = self._zeros(size)
                yield name, functools.partial(self._warm_up_sampling, size, filters, positions)
            if num_drawn != self._sampler.num_rows:
                name = f"log probabilities of {size} rows, of {num_drawn} tokens"
                yield name, functools.partial(self._warm_up_scores, size, num_drawn)

    def _warm_up_rows(self, step_size: int, size: int) -> Any:
        return self._sampler.rows(self._no_logits(step_size), [0] * size)

    def _warm_up_placed_rows(self, step_size: int, size: int) -> Any:
        positions = self._zeros(step_size)
        return self._sampler.placed_rows(self._no_logits(step_size), positions, [0] * size)

    def _warm_up_scores(self, size: int, num_drawn: int) -> Any:
        k, tokens = logprobs_size(0, self._sampler.vocab_size), self._zeros(num_drawn)
        return self._sampler.scores(self._no_logits(size), tokens, [0] * size, k)

    def _warm_up_processing(self, size: int, *, has_masks: bool) -> Any:
        inputs = self._no_inputs(size, has_masks=has_masks, has_token_lists=not has_masks)
        process = self._sampler.masked if has_masks else self._sampler.listed
        return process(self._no_logits(size), self._no_tokens(), inputs)

    def _warm_up_sampling(
        self, size: int, filters: Filters, positions: Int32[Array, " rows"] | None = None
    ) -> Any:
        needs = SamplingNeeds(filters=filters)
        inputs = self._no_inputs(size, filters=filters)
        return self._sampler.sampled(
            self._no_logits(size), self._no_tokens(), inputs, needs, positions=positions
        )

    def _no_inputs(self, num_rows: int, **needs: Any) -> SamplingInputs:
        return self._sampler.batch.build(NO_REQUESTS, SamplingNeeds(**needs), num_rows)

    def _no_logits(self, num_rows: int) -> Logits:
        return jnp.zeros((num_rows, self._sampler.vocab_size), device=self._sampler.sharding)

    def _no_tokens(self) -> LastTokens:
        return self._zeros(self._sampler.num_rows)

    def _zeros(self, size: int) -> Int32[Array, " n"]:
        return jnp.zeros(size, jnp.int32, device=self._sampler.sharding)
