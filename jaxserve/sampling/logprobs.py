"""Log probabilities of sampled and most likely tokens: on the device, then as messages."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.arrays import Leaf
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.sampling.vocabulary import top_k

FEWEST = 20
"""Of the most likely tokens that a program returns."""


def logprobs_size(k: int, vocab_size: int) -> int:
    """How many most likely tokens a program returns that has to return k; few different ones."""
    size = FEWEST
    while size < k:
        size *= 4
    return min(size, vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of R sampled tokens and of the K most likely ones of each row.

    Attributes:
      sampled: f32[R].
      ranks: i32[R], 1 + the number of tokens that are strictly more likely than the sampled one.
      top_ids: i32[R, K], most likely first, ties by the lowest id.
      top: f32[R, K].
    """

    sampled: Leaf
    ranks: Leaf
    top_ids: Leaf
    top: Leaf


def compute_logprobs(
    logits: jax.Array, tokens: jax.Array, k: int, *, as_logits: bool = False
) -> Logprobs:
    """Of the tokens i32[R] and the k most likely ones, under the softmax of logits f32[R, V].

    With ``as_logits`` the numbers are the logits themselves.
    """
    normaliser = jnp.zeros(len(logits)) if as_logits else jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], 1)
    best, ids = top_k(logits, k)
    return Logprobs(
        sampled=chosen[:, 0] - normaliser,
        ranks=1 + (logits > chosen).sum(-1, dtype=jnp.int32),
        top_ids=ids,
        top=best - normaliser[:, None],
    )


def to_message(logprobs: Logprobs, row: int, token: int, k: int) -> TokenLogprobs:
    """The entry of one row, with its k most likely tokens; the arrays must be numpy arrays."""
    ids: np.ndarray = logprobs.top_ids[row, :k]  # type: ignore[assignment]
    values: np.ndarray = logprobs.top[row, :k]  # type: ignore[assignment]
    return TokenLogprobs(
        token_ids=[token, *ids.tolist()],
        logprobs=[float(logprobs.sampled[row]), *values.tolist()],
        rank=int(logprobs.ranks[row]),
    )
