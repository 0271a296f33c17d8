"""Draws a token from each row of logits, with top-p, in a few passes over the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.vocabulary import GROUP, grouped


def row_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """key[R]: a random key for each row, a function of its seed u32[R, 2] and position i32[R]."""

    # A key of this kind is the seed itself, high half first.
    keys = jax.random.wrap_key_data(seeds[:, ::-1], impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, positions)


class _Round(NamedTuple):
    number: jax.Array  # i32[]
    tokens: jax.Array  # i32[R], the last token drawn
    above: jax.Array  # f32[R], tokens with logits above this are still in play
    sums: jax.Array  # f32[R, G], weight of those tokens in each group
    done: jax.Array  # bool[R]


def draw(logits: jax.Array, keys: jax.Array, top_p: jax.Array | None) -> jax.Array:
    """Draws from the softmax of the logits, restricted to its top-p set.

    The top-p set is the smallest set of most likely tokens whose probability reaches top_p,
    together with the tokens that tie with its last one. It is never computed: a token belongs to it
    if the tokens that are strictly more likely do not reach top_p without it. So a token is drawn
    from all; if it is not in the set, no token of at most its probability is, and the next one is
    drawn from those above it. What is accepted in the end follows the softmax over the set exactly,
    and the first draw is accepted with probability top_p or more.

    A draw is Gumbel-max in two levels, the group of 128 tokens first and then the token, which
    needs noise for G + 128 values a row in place of V.

    Args:
      logits: f32[R, V], -inf for removed tokens; at least one token of a row is not removed.
      keys: key[R].
      top_p: f32[R] in (0, 1], or None to draw from all.

    Returns:
      i32[R], in [0, V).
    """
    num_rows, width = logits.shape
    scores = grouped(logits - logits.max(-1, keepdims=True))
    weights = jnp.exp(scores)
    num_groups = scores.shape[1]

    def propose(
        number: jax.Array | int, above: jax.Array, sums: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys_now = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (num_groups + GROUP,)))(keys_now)
        group = jnp.argmax(jnp.log(sums) + noise[:, :num_groups], -1)
        members = jnp.take_along_axis(scores, group[:, None, None], 1)[:, 0]
        members = jnp.where(members > above[:, None], members, -jnp.inf)
        member = jnp.argmax(members + noise[:, num_groups:], -1)
        # Only a row of NaN could choose from the padding of the last group.
        tokens = jnp.minimum(group * GROUP + member, width - 1).astype(jnp.int32)
        return tokens, jnp.take_along_axis(members, member[:, None], 1)[:, 0]

    nothing = jnp.full(num_rows, -jnp.inf)
    sums = weights.sum(-1)
    if top_p is None:
        return propose(0, nothing, sums)[0]
    limit = jnp.where(top_p < 1, top_p * sums.sum(-1), jnp.inf)

    def next_round(r: _Round) -> _Round:
        tokens, levels = propose(r.number, r.above, r.sums)
        sums = jnp.where(scores > levels[:, None, None], weights, 0.0).sum(-1)
        more_likely = sums.sum(-1)
        # The loop must end: with a NaN, and with a top_p so small that the limit rounds to zero.
        accepted = ~(more_likely >= limit) | ~(more_likely > 0)
        return _Round(
            r.number + 1, jnp.where(r.done, r.tokens, tokens), levels, sums, r.done | accepted
        )

    start = _Round(
        jnp.int32(0), jnp.zeros(num_rows, jnp.int32), nothing, sums, jnp.zeros(num_rows, bool)
    )
    return lax.while_loop(lambda r: ~jnp.all(r.done), next_round, start).tokens
