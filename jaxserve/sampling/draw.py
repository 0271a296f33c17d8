"""Draws a token from each row of logits, with top-p, in a few passes over the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from jaxserve.sampling.vocabulary import GROUP, grouped


def row_keys(
    seeds: UInt32[Array, "rows 2"], positions: Int32[Array, " rows"]
) -> Key[Array, " rows"]:
    """Returns a random key for each row, a function of its seed (low half first) and position."""

    # The data of a threefry key is the seed itself, high half first.
    keys = jax.random.wrap_key_data(seeds[:, ::-1], impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, positions)


class _Round(NamedTuple):
    """The state of the loop over draws; candidates are tokens with logits above ``above``."""

    number: Int32[Array, ""]
    tokens: Int32[Array, " rows"]  # the last token drawn
    above: Float32[Array, " rows"]
    sums: Float32[Array, "rows groups"]  # weight of the candidates in each group
    done: Bool[Array, " rows"]


def draw(
    logits: Float32[Array, "rows vocab"],
    keys: Key[Array, " rows"],
    top_p: Float32[Array, " rows"] | None,
) -> Int32[Array, " rows"]:
    """Draws from the softmax of the logits, restricted to its top-p set.

    The top-p set is the smallest set of most likely tokens whose probability reaches top_p,
    together with the tokens that tie with its last one. It is never computed: a token belongs to
    the set if the tokens that are strictly more likely do not reach top_p without it. The first
    draw is from all tokens. If the drawn token is not in the set, no token of the same or a lower
    probability is, so the next draw is from the more likely tokens. The accepted token follows the
    softmax over the set exactly, and the first draw is accepted with probability top_p or more.

    A draw is Gumbel-max in two levels, the group of 128 tokens first and then the token, which
    needs noise for G + 128 values per row instead of V.

    Args:
      logits: f32[R, V], -inf for removed tokens. Each row has at least one token that remains.
      keys: key[R].
      top_p: f32[R] in (0, 1], or None to draw from all tokens.

    Returns:
      i32[R], in [0, V).
    """
    num_rows, width = logits.shape
    scores = grouped(logits - logits.max(-1, keepdims=True))
    weights = jnp.exp(scores)
    num_groups = scores.shape[1]

    def propose(
        number: Int32[Array, ""] | int,
        above: Float32[Array, " rows"],
        sums: Float32[Array, "rows groups"],
    ) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
        """Returns tokens drawn from those above ``above``, and their scores."""
        keys_now = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (num_groups + GROUP,)))(keys_now)
        group = jnp.argmax(jnp.log(sums) + noise[:, :num_groups], -1)
        members = jnp.take_along_axis(scores, group[:, None, None], 1)[:, 0]
        members = jnp.where(members > above[:, None], members, -jnp.inf)
        member = jnp.argmax(members + noise[:, num_groups:], -1)
        # Only a row of NaN can choose from the padding of the last group.
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
        # Negated, so that NaN ends the loop. The second comparison ends it if top_p is so small
        # that the limit is zero.
        accepted = ~(more_likely >= limit) | ~(more_likely > 0)
        return _Round(
            r.number + 1, jnp.where(r.done, r.tokens, tokens), levels, sums, r.done | accepted
        )

    start = _Round(
        jnp.int32(0), jnp.zeros(num_rows, jnp.int32), nothing, sums, jnp.zeros(num_rows, bool)
    )
    return lax.while_loop(lambda r: ~jnp.all(r.done), next_round, start).tokens
