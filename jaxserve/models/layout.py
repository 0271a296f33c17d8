"""The layout of the weights of a model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.ops.linear import WeightFormat, weight_format

Loop = Literal["scan", "unroll"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The dtype, loop, format and cut of a model's weights.

    Attributes:
      dtype: dtype of activations and of weights that are not quantised, a numpy name.
      loop: with "scan" each parameter of the layers is one array [L, ...] and the compiled program
        contains one layer; with "unroll" every layer has its own arrays and its own code.
      weights: the format of the weights of linear layers and of the embedding, a key of
        `ops.linear.FORMATS`. Biases and norms are always dense.
      cut: names of the axes that are cut across devices, along the axis `ops.linear.MODEL_AXIS` of
        a mesh. The model then computes inside `jax.shard_map`: each device has its parts of these
        axes, and the modules add up or gather what the devices compute.
    """

    dtype: str
    loop: Loop
    weights: str = "dense"
    cut: tuple[str, ...] = ()

    @property
    def format(self) -> WeightFormat:
        """The format that `weights` names."""
        return weight_format(self.weights)
