"""Tolerances of numerical tests, computed from the dtype and from the length of the sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.testing.tiny import tiny_config

DEVIATIONS = 4.0
STORES_PER_LAYER = 10
"""Tensors of a layer, each computed from the one before: two norms, a query, the rotated query, the
attention, its projection, a sum, the activation, its projection, and a sum."""


def unit(dtype: Any) -> float:
    """Returns the largest relative error of one rounding to a floating-point dtype."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps) / 2


def rounding(dtype: Any, num_terms: int, *, scale: float = 1.0) -> float:
    """Returns the largest absolute difference that rounding explains.

    The compiler chooses the order of a sum to suit the machine: its vector width, its fused
    multiply-add, its number of cores. So two correct evaluations differ, and a fixed tolerance that
    holds on one machine fails on another. A sum of n terms is rounded n times, each time by at most
    ``unit(dtype)`` of a partial sum. The roundings are close to independent and have a mean of
    zero, so the total grows as ``sqrt(n)`` and not as n (Higham and Mary, 2019): it is within four
    times ``sqrt(n) * unit(dtype) * scale``. If all partial sums were as large as ``scale``, 7e-4 of
    the values could exceed this bound; real sums are several times smaller, so no value does.

    Args:
      dtype: the dtype of the partial sums: float32 in most programs, even for half-precision
        inputs. A half-precision result is then rounded to its own dtype: add another call for that,
        with one term for each such result in sequence.
      num_terms: how many roundings follow each other: the length of a sum, and for a chain of
        operations the total of the lengths.
      scale: the largest magnitude of the partial sums, times the factor by which the operations
        that follow enlarge an error.
    """
    return DEVIATIONS * unit(dtype) * math.sqrt(num_terms) * scale


def of_model(
    config: Mapping[str, Any], num_tokens: int, *, scale: float, dtype: str = "float32"
) -> float:
    """Returns the absolute tolerance of logits or hidden states of a tiny random model.

    The random weights of `jaxserve.testing.tiny` keep the norm of a vector, and each norm layer
    divides by it again, so an error is about as large after the layers as before them.

    Args:
      config: the contents of a config.json.
      num_tokens: the number of positions that the last token attends to.
      scale: the largest magnitude of the values that are compared.
      dtype: the dtype of weights and activations; sums are float32 in any case.
    """
    width, head_dim = config["hidden_size"], config["head_dim"]
    attention = width + head_dim + num_tokens + config["num_attention_heads"] * head_dim
    mlp = width + config["intermediate_size"]
    norms = 2 * width
    num_layers = config["num_hidden_layers"]
    num_terms = num_layers * (attention + mlp + norms) + 2 * width
    tolerance = rounding("float32", num_terms, scale=scale)
    if dtype != "float32":
        tolerance += rounding(dtype, num_layers * STORES_PER_LAYER + 2, scale=scale)
    return tolerance


def assert_close(
    found: Any,
    expected: Any,
    *,
    num_tokens: int,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> None:
    """Asserts that results of a tiny random model are as expected, within `of_model`.

    Args:
      found, expected: logits, log probabilities or hidden states, of the same shape.
      num_tokens: the number of positions that the last token attends to.
      config: the contents of config.json; None: `tiny_config`.
      dtype: the dtype of weights and activations.

    Raises:
      AssertionError: the results differ by more; the message shows where.
    """
    config = tiny_config() if config is None else config
    atol = of_model(config, num_tokens, scale=np.abs(expected).max(), dtype=dtype)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
