"""The shape of a model: the sizes and variants that its modules are built from."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.ops import rope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes and variants of a model; hashable.

    Attributes:
      architecture: a key of `models.registry.MODELS`.
      activation: a key of `ops.elementwise.ACTIVATIONS`.
      norm_eps: added to the mean of the squares in every norm.
      windows: for each layer, the number of latest positions that a query sees, including its own;
        None for all.
      qkv_bias, attention_output_bias, mlp_bias: the linear layers that have a bias.
      qk_norm: normalises the queries and keys of each head.
      tied_head: the embedding is also the output head.
      context_length: the longest context, in tokens, that the model is made for.
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
        """Whether one program fits all layers, so that a loop can run them."""
        return len(set(self.windows)) == 1
