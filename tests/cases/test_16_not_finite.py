"""JS-228: a model whose logits are NaN or infinite. Such a request fails, and no other does.

Before, the reply had status 200, token 0 for ever and log probabilities of -9999, and embeddings
were lists of null.
"""

import numpy as np
import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend

EMBEDDINGS = "/v1/embeddings"
BAD = 77
"""The token whose embedding is NaN."""

PROMPT = [1, 2, BAD, 3]
REASON = "the model gave this request logits that are not finite numbers"

BODIES = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "drawn": {"temperature": 1, "seed": 3},
    "filtered": {"temperature": 0.7, "top_p": 0.5, "top_k": 9, "seed": 3},
    "echo": {"temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 0},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "grammar": {"temperature": 0, "guided_regex": "[0-9]{3}"},
    "allowed": {"temperature": 0, "allowed_token_ids": [3, 4]},
    "several": {"temperature": 1, "n": 2, "seed": 5},
}


def checkpoint(folder, damage):
    config = tiny_config()
    tensors = random_tensors(config)
    damage(tensors)
    return write_checkpoint(folder, config, tensors, tokenizer=full_backend(config["vocab_size"]))


def nan_in_one_embedding(tensors):
    tensors["model.embed_tokens.weight"][BAD, 5] = np.nan


def nan_in_the_last_norm(tensors):
    tensors["model.norm.weight"][7] = np.nan


def infinity_in_the_head(tensors):
    tensors["lm_head.weight"][300, 3] = -np.inf


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("damaged") / "damaged", nan_in_one_embedding)


@pytest.fixture(scope="module")
def damaged_norm(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("norm") / "norm", nan_in_the_last_norm)


@pytest.fixture(scope="module")
def server(serve, damaged):
    return serve(damaged)


def body_of(**fields):
    return {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **fields}


@pytest.mark.parametrize("kind", BODIES)
def test_a_completion_is_an_error_and_the_next_request_is_served(server, kind):
    """JS-228."""
    before = server.metric("corrupted_requests_total")
    error = server.refused(COMPLETIONS, body_of(**BODIES[kind]), status=500)
    assert error["message"].startswith(REASON)
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    server.until_idle()
    # The error of the first of several completions may abort the others.
    most = BODIES[kind].get("n", 1)
    assert 1 <= server.metric("corrupted_requests_total") - before <= most


def test_a_stream_ends_with_an_error_event(serve, random_checkpoint, tmp_path):
    """JS-228: with the tokens before it."""
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    (choice,) = serve(random_checkpoint).complete([1, 2, 3], **body)["choices"]
    tokens = choice["token_ids"]
    count = next(i for i in range(3, 12) if tokens[i] not in [1, 2, 3, *tokens[:i]])

    def damage(tensors):
        tensors["model.embed_tokens.weight"][tokens[count]] = np.nan

    server = serve(checkpoint(tmp_path / "stream", damage)).with_one_token_per_output()
    streamed = server.stream_complete([1, 2, 3], **body)
    error = streamed.chunks.pop()["error"]
    assert error["message"].startswith(REASON)
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    found = [token for piece in streamed.choices() for token in piece["token_ids"]]
    assert found
    assert found == tokens[: count + 1][: len(found)]
    assert streamed.finish_reason() is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_an_error(serve, damaged_norm, stream):
    """JS-228: every logit of this model is NaN, so a stream fails before it starts."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": stream}
    reply = serve(damaged_norm).post(CHAT, body)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"].startswith(REASON)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_vector_is_an_error(server, encoding):
    """JS-228: not a list of null."""
    good = server.post(EMBEDDINGS, {"input": [1, 2, 3], "encoding_format": encoding})
    assert good.status_code == 200
    for inputs in (PROMPT, [[1, 2], PROMPT]):
        error = server.refused(
            EMBEDDINGS, {"input": inputs, "encoding_format": encoding}, status=500
        )
        assert "hidden states that are not finite" in error["message"]


def test_one_infinite_weight_of_the_head_is_an_error(serve, tmp_path):
    """JS-228: also where the infinity is never the most likely token."""
    broken = serve(checkpoint(tmp_path / "head", infinity_in_the_head))
    for kind in ("greedy", "drawn", "echo"):
        reply = broken.post(COMPLETIONS, {**body_of(**BODIES[kind]), "prompt": [1, 2, 3]})
        assert reply.status_code == 500, kind
        assert REASON in reply.text


def test_overflow_in_float16_is_an_error(serve, tmp_path):
    """JS-228: weights that float32 and bfloat16 can compute with."""

    def enlarge(tensors):
        for name, tensor in tensors.items():
            if "gate_proj" in name or "up_proj" in name:
                tensor *= 600

    folder = checkpoint(tmp_path / "large", enlarge)
    body = {**body_of(temperature=0, max_tokens=2), "prompt": [1, 2, 3]}
    reply = serve(folder, dtype="float16").post(COMPLETIONS, body)
    assert (reply.status_code, REASON in reply.text) == (500, True)
    serve(folder).complete([1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True)


def test_ignored_values_give_the_replies_of_vllm(serve, damaged):
    """JS-228: with --on-nonfinite ignore."""
    server = serve(damaged, on_nonfinite="ignore")
    reply = server.complete(**body_of(temperature=0, logprobs=1))
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 5
    assert server.metric("corrupted_requests_total") == 0
    server.good_request()
