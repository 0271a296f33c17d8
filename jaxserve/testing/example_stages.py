"""Declared stages that each use another part of what a stage may read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.sampling import top_n_sigma
from jaxserve.sampling.declaration import ALL_TOKENS, Parameter, Stage, StageRows


def scale(logits: Any, rows: StageRows) -> Any:
    """Multiplies the logits of each row by a factor."""
    return logits * rows["factor"][:, None]


def lower_tokens(logits: Any, rows: StageRows) -> Any:
    """Lowers the logits of the last tokens."""
    index = jnp.arange(len(logits))[:, None]
    found = jnp.zeros(logits.shape, bool).at[index, rows.tokens].set(True, mode="drop")
    return jnp.where(found, logits - rows["lower"][:, None], logits)


def remove_output(logits: Any, rows: StageRows) -> Any:
    """Removes all tokens of the output."""
    width = rows.tokens.shape[1]
    is_output = jnp.arange(width) >= width - rows.num_output_tokens[:, None]
    tokens = jnp.where(is_output, rows.tokens, logits.shape[1])
    return logits.at[jnp.arange(len(logits))[:, None], tokens].set(-jnp.inf, mode="drop")


def drop_some(logits: Any, rows: StageRows) -> Any:
    """Removes each token with a probability, but keeps the most likely one."""
    noise = jax.vmap(lambda key: jax.random.uniform(key, logits.shape[1:]))(rows.keys())
    is_best = logits == logits.max(-1, keepdims=True)
    return jnp.where((noise < rows["drop"][:, None]) & ~is_best, -jnp.inf, logits)


SCALE = Stage(name="scale", apply=scale, parameters=(Parameter("factor", "float", 1.0),))
LOWER = Stage(
    name="lower", apply=lower_tokens, parameters=(Parameter("lower", "float", 0.0),), num_tokens=4
)
ONCE = Stage(
    name="once",
    apply=remove_output,
    parameters=(Parameter("once", "bool", False),),
    num_tokens=ALL_TOKENS,
)
DROP = Stage(
    name="drop", apply=drop_some, parameters=(Parameter("drop", "float", 0.0),), is_filter=True
)
STAGES = (top_n_sigma.stage, SCALE, LOWER, ONCE, DROP)
