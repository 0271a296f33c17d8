"""The shape of a model: the sizes and variants that its modules are built from."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.ops import rope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the modules are built from; hashable.

    Attributes:
      architecture: a key of `models.registry.MODELS`.
      windows: per layer, how many of the latest positions a query sees, itself included; None: all.
      qk_norm: queries and keys are normalised per head.
      tied_head: the embedding is the output head too.
      context_length: the longest text in tokens that the model is made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    rope: rope.Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    context_length: int

    @property
    def layers_are_alike(self) -> bool:
        """Whether one program fits all layers, so that they can be looped over."""
        return len(set(self.windows)) == 1
