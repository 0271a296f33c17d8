"""N-gram drafts: the tokens that followed the last few tokens earlier in the same request.

Also called prompt lookup. It costs nearly nothing, and is often right where a text repeats itself
or its prompt: edits of code, summaries, extraction, tables.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

LONGEST_MATCH = 4
"""Tokens at the end of a request that an earlier place is compared with."""

SHORTEST_MATCH = 2
"""Fewer equal tokens than this are taken for chance."""


def propose(
    tokens: Int32[Array, "requests length"],
    num_tokens: Int32[Array, " requests"],
    *,
    num_drafts: int,
) -> tuple[Int32[Array, "requests {num_drafts}"], Int32[Array, " requests"]]:
    """Continues each request as it continued after the best earlier match of its end.

    The best match has the most tokens, up to `LONGEST_MATCH`, and among those is the latest. If
    fewer than K tokens followed it, they are repeated: an end with period p goes on with period p.

    See `proposer.ProposeFn`. A request gets all K drafts or none.
    """
    length = tokens.shape[1]
    places = jnp.arange(length)
    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    # How many tokens up to each place equal those at the end.
    matched = jnp.zeros(tokens.shape, jnp.int32)
    equal = (places < last) & (num_tokens > 0)[:, None]
    for back in range(LONGEST_MATCH):
        end_token = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), 1)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :length]
        equal &= (shifted == end_token) & (places >= back)
        matched += equal
    # The longest match first, then the latest place.
    best = jnp.argmax(matched * length + places, axis=1)[:, None]
    is_match = jnp.take_along_axis(matched, best, 1)[:, 0] >= SHORTEST_MATCH
    period = jnp.maximum(last - best, 1)
    sources = jnp.clip(best + 1 + jnp.arange(num_drafts) % period, 0, length - 1)
    drafts = jnp.take_along_axis(tokens, sources, 1)
    return drafts, jnp.where(is_match, num_drafts, 0)
