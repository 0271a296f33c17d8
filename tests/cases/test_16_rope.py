"""Rotary embeddings that other servers compute in another way than their model was trained."""

import numpy as np

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.testing.reference import Reference
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from jaxserve.testing.tolerance import assert_close


def test_js_223_dynamic_scaling_rotates_each_token_by_its_own_length(serve, tmp_path, rng) -> None:
    """Prompts up to the original length are not scaled. Longer ones equal token by token steps."""
    length, factor, theta = 32, 2.0, 10000.0
    scaling = {"rope_type": "dynamic", "factor": factor}
    config = tiny_config(max_position_embeddings=length, rope_scaling=scaling)
    folder = write_checkpoint(tmp_path / "ntk", config, tokenizer=full_backend())
    tensors = dict(open_checkpoint(str(folder)).tensors())
    positions = np.maximum(np.arange(1.0, 51.0), length)
    bases = theta * (factor * positions / length - (factor - 1)) ** (16 / 14)
    by_position = bases[:, None, None] ** -(np.arange(0, 16, 2) / 16)
    prompt = [int(i) for i in rng.integers(0, 512, 50)]
    expected = Reference(tensors, frequencies=by_position).logprobs(prompt)
    unscaled = Reference(tensors).logprobs(prompt)
    assert np.abs(expected - unscaled)[:length].max() < 1e-9 < np.abs(expected - unscaled).max()
    for chunk in (32, 7):
        server = serve(folder, max_num_batched_tokens=chunk)
        assert server.text_engine.model.max_model_len == 64
        why = {d.what: d.why for d in server.text_engine.engine.ready.decisions}["rope"]
        assert "beyond 32 tokens" in why
        reply = server.complete(prompt, max_tokens=0, echo=True, logprobs=0)
        found = reply["choices"][0]["logprobs"]["token_logprobs"][1:]
        assert_close(
            found, [expected[i, token] for i, token in enumerate(prompt[1:])], num_tokens=50
        )
