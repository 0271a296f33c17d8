"""Logits of every family and rope scaling, compared with `transformers` (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.models.registry import MODELS
from jaxserve.testing import tolerance
from jaxserve.testing.tiny import random_tensors

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "tiny_logits.npz")
CONFIGS = json.loads(str(GOLDEN["configs"]))
PROMPT = GOLDEN["prompt"].tolist()
UNROLLED = ("llama", "mistral", "qwen2-windows", "qwen3", "gemma2", "gemma3")
CASES = [*((name, "scan") for name in CONFIGS), *((name, "unroll") for name in UNROLLED)]


def assert_close(logits: np.ndarray, name: str, at: int | slice = slice(None)) -> None:
    """Compares with float32 logits of `transformers`, at all positions or at one."""
    tolerance.assert_close(logits, GOLDEN[name][at], num_tokens=len(PROMPT), config=CONFIGS[name])


def test_every_architecture_is_covered():
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(MODELS)


@pytest.mark.parametrize(("name", "loop"), CASES)
def test_logits_equal_those_of_transformers(name, loop, paged_model, in_memory, rng):
    """Runs the whole prompt and, in the same steps, the prompt in three chunks."""
    config = CONFIGS[name]
    model = paged_model(in_memory(random_tensors(config)), config, loop=loop)
    model.start(2, 64, rng)
    cut = sorted(rng.choice(np.arange(1, 40), 2, replace=False).tolist())
    whole, first = model.step([PROMPT, PROMPT[: cut[0]]], num_tokens=80)
    _, second = model.step([[], PROMPT[cut[0] : cut[1]]], num_tokens=80)
    _, third = model.step([[], PROMPT[cut[1] :]], num_tokens=80)
    assert_close(whole, name)
    assert_close(np.concatenate((first, second, third)), name)


@pytest.mark.parametrize("name", ["llama-dynamic", "mistral", "gemma2", "gemma3"])
def test_logits_of_decode_steps_equal_those_of_transformers(name, paged_model, in_memory, rng):
    """Runs two prompts, then one token per step."""
    config = CONFIGS[name]
    model = paged_model(in_memory(random_tensors(config)), config, loop="scan")
    model.start(2, 64, rng)
    start = 30
    model.step([PROMPT[:start], PROMPT[: start + 3]], num_tokens=64)
    for at in range(start, 37):
        a, b = model.step([PROMPT[at : at + 1], PROMPT[at + 3 : at + 4]], decode_only=True)
        assert_close(a[0], name, at)
        assert_close(b[0], name, at + 3)
