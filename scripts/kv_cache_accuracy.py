#!/usr/bin/env python3
"""Compares the logits of a model with a smaller KV cache to those with a plain one.

    python scripts/kv_cache_accuracy.py [--model MODEL] [--text FILE ...] [--tokens N]

The model reads the first N tokens of each text (teacher forcing), and each token reads its context
from the cache. The table has, for each dtype of the cache: the mean and the largest KL divergence
of the distribution of the next token from that with the plain cache, in nats; the fraction of
positions with the same most likely token; and the mean loss of the texts, in nats per token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from jaxserve.checkpoint.locate import open_tokenizer
from jaxserve.config import ModelConfig
from jaxserve.testing.one_step import logits_of

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "security.md"]
CACHE_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


@dataclass(frozen=True)
class Drift:
    """The difference of logits from those with the plain cache; see the module."""

    mean_kl: float
    largest_kl: float
    agreement: float
    loss: float


def drift(logits: np.ndarray, plain: np.ndarray, tokens: Sequence[int]) -> Drift:
    """Compares ``logits`` f32[T, V] with ``plain``, after each of T >= 2 tokens."""
    logprobs, expected = _log_softmax(logits), _log_softmax(plain)
    divergence = np.sum(np.exp(expected) * (expected - logprobs), axis=-1)
    return Drift(
        mean_kl=float(divergence.mean()),
        largest_kl=float(divergence.max()),
        agreement=float(np.mean(logits.argmax(-1) == plain.argmax(-1))),
        loss=-float(logprobs[np.arange(len(tokens) - 1), tokens[1:]].mean()),
    )


def measure(
    model: str,
    tokens: Sequence[int],
    *,
    dtype: str = "float32",
    cache_dtypes: Sequence[str] = CACHE_DTYPES,
) -> dict[str, Drift]:
    """Returns the drift of each dtype of the cache, and of "plain": the cache in ``dtype``."""
    plain = logits_of(Path(model), tokens, dtype=dtype)
    found = {"plain": drift(plain, plain, tokens)}
    for cache_dtype in cache_dtypes:
        logits = logits_of(Path(model), tokens, dtype=dtype, cache_dtype=cache_dtype)
        found[cache_dtype] = drift(logits, plain, tokens)
    return found


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model, help="as for the server")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS, help="files to read")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each text, at least 2")
    parser.add_argument("--dtype", default="float32", help="dtype of weights and activations")
    options = parser.parse_args()
    tokenizer = open_tokenizer(options.model)
    texts = [tokenizer.encode(path.read_text())[: options.tokens] for path in options.text]
    found = [measure(options.model, tokens, dtype=options.dtype) for tokens in texts]
    print(f"{sum(map(len, texts))} tokens of {len(texts)} texts, model in {options.dtype}")
    print(f"{'cache':14s} {'mean KL':>9s} {'largest':>9s} {'same token':>11s} {'loss':>8s}")
    for name in found[0]:
        drifts = [each[name] for each in found]
        print(
            f"{name:14s} {np.mean([d.mean_kl for d in drifts]):9.6f} "
            f"{max(d.largest_kl for d in drifts):9.4f} "
            f"{np.mean([d.agreement for d in drifts]):11.2%} "
            f"{np.mean([d.loss for d in drifts]):8.4f}"
        )
    return 0


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


if __name__ == "__main__":
    sys.exit(main())
