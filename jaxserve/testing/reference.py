"""A textbook transformer: the whole sequence at once, in float64, without a cache, in plain numpy.

The reference does not read config.json: a test states in numbers what a config should mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True, eq=False)
class Reference:
    """A Llama, or a model of a similar family.

    Biases, and norms of queries and keys, are applied if ``tensors`` has them.

    Attributes:
      tensors: the weights, by their names in a checkpoint.
      head_dim: even.
      eps: added to the mean square in every norm.
      frequencies: radians per position for each pair of dimensions, ``[head_dim / 2]``. None means
        the frequencies of base 10000.
      windows: for each layer, how many of the latest positions a query sees; None for all. None
        instead of a sequence means all positions in all layers.
      tied: use the embedding as the output layer, even if ``tensors`` has ``lm_head.weight``.
    """

    tensors: Mapping[str, np.ndarray]
    head_dim: int = 16
    eps: float = 1e-5
    frequencies: np.ndarray | None = None
    windows: Sequence[int | None] | None = None
    tied: bool = False

    def logits(self, tokens: Sequence[int]) -> Float64[np.ndarray, "tokens vocab"]:
        """Returns the logits f64[T, V] after each token."""
        head = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        return _product(self.hidden(tokens), self._tensor(head))

    def hidden(self, tokens: Sequence[int]) -> Float64[np.ndarray, "tokens hidden"]:
        """Returns the input f64[T, D] of the output layer at each token."""
        x = self._tensor("model.embed_tokens.weight")[list(tokens)]
        layer = 0
        while f"model.layers.{layer}.input_layernorm.weight" in self.tensors:
            name = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, name + "input_layernorm"), layer)
            h = self._norm(x, name + "post_attention_layernorm")
            gate, up = (self._linear(h, f"{name}mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, name + "mlp.down_proj")
            layer += 1
        return self._norm(x, "model.norm")

    def logprobs(self, tokens: Sequence[int]) -> Float64[np.ndarray, "tokens vocab"]:
        """Returns the natural logarithms f64[T, V] of the probabilities after each token."""
        logits = self.logits(tokens)
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Decodes ``count`` tokens greedily after a prompt, without regard to end tokens."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        name, count = f"model.layers.{layer}.self_attn.", len(x)
        q, k, v = (
            self._linear(x, f"{name}{part}_proj").reshape(count, -1, self.head_dim)
            for part in "qkv"
        )
        if f"{name}q_norm.weight" in self.tensors:
            q, k = self._norm(q, name + "q_norm"), self._norm(k, name + "k_norm")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.head_dim)
        back = np.arange(count)[:, None] - np.arange(count)
        window = self.windows[layer] if self.windows is not None else None
        scores[:, (back < 0) | (back >= (window or np.inf))] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        return self._linear(attended, name + "o_proj")

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        frequencies = self.frequencies
        if frequencies is None:
            frequencies = 10000.0 ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        turns = np.exp(1j * np.arange(len(x))[:, None, None] * frequencies)
        first, second = np.split(x, 2, axis=-1)
        turned = (first + 1j * second) * turns
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        return x / scale * self._tensor(name + ".weight")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = _product(x, self._tensor(name + ".weight"))
        return y + self._tensor(name + ".bias") if name + ".bias" in self.tensors else y

    def _tensor(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float64)


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns ``x @ weight.T`` without BLAS, whose threads block each other on a busy machine."""
    return np.einsum("ti,oi->to", x, weight)
