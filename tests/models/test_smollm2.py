"""The default model, compared with `transformers` (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.models.registry import gguf_names

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text())


def test_greedy_tokens_equal_those_of_transformers(smollm2, paged_model, rng):
    checkpoint = open_checkpoint(str(smollm2), names_of=gguf_names)
    model = paged_model(checkpoint, checkpoint.config, loop="scan")
    prompts = [case["prompt_token_ids"] for case in GOLDEN]
    want = np.array([case["output_token_ids"] for case in GOLDEN])
    model.start(len(prompts), 96, rng)
    tokens = [logits[-1].argmax() for logits in model.step(prompts)]
    output = [tokens]
    for _ in range(want.shape[1] - 1):
        step = model.step([[int(token)] for token in tokens], num_tokens=8, decode_only=True)
        tokens = [logits[-1].argmax() for logits in step]
        output.append(tokens)
    np.testing.assert_array_equal(np.transpose(output), want)
