"""The reference model, compared with `transformers` (tests/golden)."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.testing.reference import Reference
from jaxserve.testing.tiny import random_tensors
from jaxserve.testing.tolerance import assert_close

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "tiny_logits.npz")
CONFIGS = json.loads(str(GOLDEN["configs"]))
PROMPT = GOLDEN["prompt"].tolist()
OPTIONS = {
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-linear": {"frequencies": 10000.0 ** -(np.arange(8) / 8) / 4},
    "mistral": {"head_dim": 32, "windows": (11, 11, 11)},
    "qwen2": {"tied": True},
    "qwen2-windows": {"windows": (None, 7, 7)},
    "qwen3": {"head_dim": 32},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    reference = Reference(random_tensors(CONFIGS[name]), **OPTIONS[name])
    logits = reference.logits(PROMPT)
    assert_close(logits, GOLDEN[name], num_tokens=len(PROMPT), config=CONFIGS[name])
    probabilities = np.exp(reference.logprobs(PROMPT))
    np.testing.assert_allclose(probabilities.sum(-1), 1)
    assert reference.greedy(PROMPT, 2)[0] == logits[-1].argmax() == probabilities[-1].argmax()
