"""Token IDs in requests must be below the width of the logits, in every field of every endpoint.

In JAX a larger ID wraps, clamps or is dropped silently, and would change the completions of other
requests: CVE-2026-93840, CVE-2026-93989.
"""

import httpx
import pytest

from jaxserve.testing.tiny import tiny_config, write_checkpoint
from server.testing import ServerThread, flags

CHAT = [{"role": "user", "content": "hello"}]
GOOD = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}

ENDPOINTS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
}
PLACES = [
    *((path, body, name, [9]) for path, body in ENDPOINTS.items() for name in ("stop_token_ids",)),
    *((path, body, "allowed_token_ids", [9]) for path, body in ENDPOINTS.items()),
    *((path, body, "logit_bias", None) for path, body in ENDPOINTS.items()),
    ("/v1/completions", {"max_tokens": 2}, "prompt", [9]),
    ("/v1/completions", {"max_tokens": 2}, "prompt", [[9], [9]]),
    ("/v1/embeddings", {}, "input", [9]),
    ("/v1/embeddings", {}, "input", [[9], [9]]),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose model has more logits than tokens, as with a padded embedding."""
    config = tiny_config()
    folder = write_checkpoint(tmp_path_factory.mktemp("ids") / "model", config)
    sizes = {"dtype": "float32", "num_blocks": 33, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    server = ServerThread(*flags(model=folder, **sizes, warmup=False, compilation_cache_dir=""))
    yield server
    server.close()


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def with_id(value, bad):
    """Returns nested lists of IDs with ``bad`` as the last ID, or a map with ``bad`` as a key."""
    if value is None:
        return {"9": 1, str(bad): 1}
    if isinstance(value[0], list):
        return [*value[:-1], with_id(value[-1], bad)]
    return [*value, bad]


@pytest.mark.parametrize(("path", "body", "name", "value"), PLACES)
def test_rejects_ids_beyond_the_logits(server, http, path, body, name, value) -> None:
    width = server.text_engine.model.vocab_size
    expected = http.post("/v1/completions", json=GOOD).json()["choices"]
    for bad in (
        width,
        width + 1,
        2 * width,
        2**31 - 1,
        2**31,
        2**32,
        2**32 + 9,
        2**63,
        -1,
        -(2**31),
    ):
        reply = http.post(path, json={**body, name: with_id(value, bad)})
        assert reply.status_code == 400, (bad, reply.text)
        assert reply.json()["error"]["param"].startswith(name)
    reply = http.post(path, json={**body, name: with_id(value, width - 1)})
    assert reply.status_code == 200, reply.text
    assert http.post("/v1/completions", json=GOOD).json()["choices"] == expected


@pytest.mark.parametrize("path", ENDPOINTS)
def test_bad_words_become_ids_below_the_width(server, http, path) -> None:
    """The tokenizer that encodes them has fewer tokens than the model has logits."""
    assert server.text_engine.model.tokenizer.vocab_size < server.text_engine.model.vocab_size
    reply = http.post(path, json={**ENDPOINTS[path], "bad_words": ["hello", "<|im_end|>", "é🔥"]})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("bad", [-1, 2**32, 2**63, 10**30])
def test_detokenize_rejects_ids_out_of_range(http, bad) -> None:
    assert http.post("/detokenize", json={"tokens": [1, bad]}).status_code == 400
