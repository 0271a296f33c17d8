"""Servers of tiny Gemma models: log probabilities of a prompt equal those of `transformers`."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.testing.tiny import random_tensors, write_checkpoint
from jaxserve.testing.tolerance import assert_close

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "tiny_logits.npz")
CONFIGS = json.loads(str(GOLDEN["configs"]))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_prompt_logprobs_equal_those_of_transformers(name, serve, tmp_path) -> None:
    """The windows of 9 tokens are shorter than the prompt, which takes several steps."""
    config, prompt = CONFIGS[name], GOLDEN["prompt"].tolist()
    folder = write_checkpoint(tmp_path / name, config, random_tensors(config))
    # Each of the seven groups of layers of Gemma 3 has blocks of its own.
    with serve(folder, "--num-blocks", "128", "--no-warmup") as server, server.client() as client:
        reply = client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=20,
            temperature=0,
            extra_body={"prompt_logprobs": 0, "return_token_ids": True, "ignore_eos": True},
        )
    (choice,) = reply.choices
    entries = choice.prompt_logprobs[1:]
    logits = GOLDEN[name].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
    at = np.arange(len(prompt) - 1)
    assert_close(found, expected[at, prompt[1:]], num_tokens=len(prompt), config=config)
    assert choice.token_ids[0] == np.argmax(logits[-1])
    assert len(choice.token_ids) == 20
