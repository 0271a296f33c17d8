"""The shape of a model: the facts that all families share. A family adds its own in a subclass."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models.cache_layout import CacheLayout
from jaxserve.ops.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The facts in which the layers of one model may differ.

    Attributes:
      window: the number of latest positions that a query sees, its own included; None: all.
      rope: the rotation of queries and keys.
    """

    window: int | None
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and variants of a model; hashable.

    Attributes:
      architecture: the name of the family in config.json.
      norm_eps: added to the mean of the squares in every norm.
      layers: one entry for each layer.
      tied_head: the embedding is the output head too.
      context_length: the longest context, in tokens, that the model is made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    context_length: int

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def cache_layout(self) -> CacheLayout:
        """Where the layers keep their keys and values. A family may override it."""
        return CacheLayout.of(self.windows)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations, in the order in which the layers first use them."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))
