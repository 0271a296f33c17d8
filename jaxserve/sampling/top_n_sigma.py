"""Top-n-sigma: keeps the tokens whose logit is within n standard deviations of the largest one.

Source: "Top-nsigma: Not All Logits Are You Need", https://arxiv.org/abs/2411.07641. The set of
tokens that are kept does not depend on the temperature.
"""

import jax.numpy as jnp

from jaxserve.sampling.declaration import Parameter, Stage, StageRows
from jaxserve.sampling.stages import Logits


def keep_within_sigmas(logits: Logits, rows: StageRows) -> Logits:
    """Applies the filter to logits f32[R, V]. Removed tokens do not count in the deviation."""
    is_kept = logits > -jnp.inf
    deviation = jnp.std(logits, axis=-1, keepdims=True, where=is_kept)
    least = logits.max(-1, keepdims=True) - rows["top_n_sigma"][:, None] * deviation
    return jnp.where(logits >= least, logits, -jnp.inf)


stage = Stage(
    name="top_n_sigma",
    parameters=(Parameter("top_n_sigma", "float", default=0.0, low=0.0),),
    apply=keep_within_sigmas,
    is_filter=True,
    warm_up=False,
)
