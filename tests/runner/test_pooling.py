"""Vectors of prompts: the longest prompt, and the number of compiled programs."""

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams

VOCAB, CONTEXT, TOKENS_IN_A_STEP = 300, 96, 32


def pooling_params(pooling="last"):
    return SamplingParams(temperature=0, seed=0, pooling=pooling)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_may_fill_the_context(tiny_model, generate, depth):
    prompt = np.random.default_rng(5).integers(0, VOCAB, CONTEXT).tolist()
    requests = {kind: (prompt, pooling_params(kind)) for kind in ("last", "mean")}
    outputs = generate(requests, depth=depth)
    atol = tiny_model.tolerance(CONTEXT, of="final")
    final = np.asarray(tiny_model.final(tiny_model.hidden(prompt)))
    for kind, expected in (("last", final[-1]), ("mean", final.mean(0))):
        (output,) = outputs[kind]
        np.testing.assert_allclose(output.embedding, expected, rtol=0, atol=atol)


def test_the_number_of_requests_compiles_no_further_programs(runner, generate):
    rng = np.random.default_rng(6)

    def prompt(num_tokens):
        return rng.integers(0, VOCAB, num_tokens).tolist()

    runner.warm_up(lambda *_: None)  # everything but pooling
    for num_tokens in range(1, TOKENS_IN_A_STEP + 1):
        generate({"a": (prompt(num_tokens), pooling_params())})
    before = runner.num_compilations
    for count in (1, 2, 4, 7):
        requests = {
            str(i): (prompt(rng.integers(1, 60)), pooling_params(("last", "mean")[i % 2]))
            for i in range(count)
        }
        generate(requests)
        generate(requests, depth=2, max_num_batched_tokens=8)
    assert runner.num_compilations == before
