"""Log probabilities of sampled and most likely tokens: on the device, then as messages."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxserve.arrays import Leaf
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.sampling.vocabulary import top_k

MIN_TOP_TOKENS = 20
"""Each program returns at least this many of the most likely tokens."""


def logprobs_size(k: int, vocab_size: int) -> int:
    """Returns the number of most likely tokens to compute when k in [0, V] are requested.

    It is rounded up to one of a few sizes, since each size is a program of its own.
    """
    size = MIN_TOP_TOKENS
    while size < k:
        size *= 4
    return min(size, vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of R sampled tokens and of the K most likely ones of each row.

    Attributes:
      sampled: f32[R], of the sampled tokens.
      ranks: i32[R], 1 + the number of tokens that are strictly more likely than the sampled one.
      top_ids: i32[R, K], most likely first, ties by the lowest id.
      top: f32[R, K], of the tokens in ``top_ids``.
    """

    sampled: Float32[Leaf, " rows"]
    ranks: Int32[Leaf, " rows"]
    top_ids: Int32[Leaf, "rows k"]
    top: Float32[Leaf, "rows k"]


def compute_logprobs(
    logits: Float32[Array, "rows vocab"],
    tokens: Int32[Array, " rows"],
    k: int,
    *,
    as_logits: bool = False,
) -> Logprobs:
    """Scores the tokens i32[R] and the k most likely ones under the softmax of logits f32[R, V].

    With ``as_logits`` the values are the logits themselves.
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
    """Returns the entry of one row, with its k most likely tokens.

    Call it with numpy arrays: it reads single elements, and each would be a transfer from the
    device.
    """
    return TokenLogprobs(
        token_ids=(token, *np.asarray(logprobs.top_ids[row, :k]).tolist()),
        logprobs=(float(logprobs.sampled[row]), *np.asarray(logprobs.top[row, :k]).tolist()),
        rank=int(logprobs.ranks[row]),
    )
