"""Model families in flax: their layers, and how config.json and weights are read.

The package knows the shape of a model (`spec`) and the ops, and nothing of requests, steps or
sampling. A family is one file and one line in `registry`.
"""

from jaxserve.models.registry import register

__all__ = ["register"]
