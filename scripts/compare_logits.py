#!/usr/bin/env python3
"""Compares the logits of tiny random models with those of `transformers`, for every family.

    pip install torch
    python scripts/compare_logits.py [--models NAME ...] [--seeds N]

Weights and prompts are random; a prompt has 100 tokens, and windows of attention have 9 or 11.
jaxserve reads each model from safetensors and from a GGUF file, and computes in float32 and in
bfloat16. The reference is `transformers` in float32, with the same weights, rounded to the dtype.

The table is in Markdown. Each line is for the seed with the largest difference:

- logit: the largest absolute logit
- difference: the largest absolute difference of a logit from the reference
- bound: the difference that rounding explains if no layer amplifies it, see
  `jaxserve.testing.tolerance`
- of transformers: the difference of `transformers` in the same dtype from the reference

Exits with 1 if a difference is larger than its bound and than twice that of `transformers`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from jaxserve.testing.one_step import logits_of
from jaxserve.testing.tiny import random_tensors, write_checkpoint
from jaxserve.testing.tiny_gguf import write_gguf
from jaxserve.testing.tolerance import of_model

MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
"""Names in `make_golden.CONFIGS`."""

DTYPES = ("float32", "bfloat16")
PROMPT_LENGTH = 100


@dataclass(frozen=True)
class Figures:
    """The figures of one model, one dtype and one kind of file; see the module."""

    logit: float
    difference: float
    bound: float
    of_transformers: float

    @property
    def is_close(self) -> bool:
        """Whether the difference is no larger than it may be."""
        return self.difference <= max(self.bound, 2 * self.of_transformers)


def compare(config: Mapping[str, Any], seed: int, dtype: str) -> dict[str, Figures]:
    """Returns the figures of a model with random weights, by kind of file."""
    import make_golden  # imports torch

    tensors = {
        name: tensor.astype(np.dtype(dtype)).astype(np.float32)
        for name, tensor in random_tensors(config, seed=seed).items()
    }
    prompt = np.random.default_rng(seed).integers(0, config["vocab_size"], PROMPT_LENGTH)
    expected = make_golden.logits_of(config, tensors, prompt)
    theirs = make_golden.logits_of(config, tensors, prompt, dtype=dtype)
    logit = largest(expected)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in (
            ("safetensors", write_checkpoint(Path(folder, "model"), config, tensors)),
            ("GGUF", write_gguf(Path(folder, "model.gguf"), config, tensors)),
        ):
            ours = logits_of(path, prompt.tolist(), dtype=dtype)
            figures[kind] = Figures(
                logit=logit,
                difference=largest(ours - expected),
                bound=of_model(config, PROMPT_LENGTH, scale=logit, dtype=dtype),
                of_transformers=largest(theirs - expected),
            )
    return figures


def largest(values: np.ndarray) -> float:
    """Returns the largest absolute value."""
    return float(np.abs(values).max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MODELS, help="default: one of each family"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="random weights and prompts of each model (default: 3)"
    )
    options = parser.parse_args(arguments)
    import make_golden

    print("| model | dtype | file | logit | difference | bound | of transformers |")
    print("|---|---|---|---|---|---|---|", flush=True)
    is_close = True
    for name in options.models:
        config = dict(make_golden.CONFIGS[name])
        if "query_pre_attn_scalar" in config:
            config["query_pre_attn_scalar"] = config["head_dim"]  # GGUF files lack the key
        for dtype in DTYPES:
            runs = [compare(config, seed, dtype) for seed in range(options.seeds)]
            for kind in runs[0]:
                is_close &= all(run[kind].is_close for run in runs)
                worst = max((run[kind] for run in runs), key=lambda each: each.difference)
                numbers = " | ".join(f"{value:.2g}" for value in astuple(worst))
                print(f"| {name} | {dtype} | {kind} | {numbers} |", flush=True)
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
