"""Failures that users of other servers have reported: tokens, their IDs and texts, numbers."""

from typing import Any

import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS, FIRST_SPECIAL_ID
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend, spm_backend

ENDS = ("<end-g>", "<end-c>")


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    """A random model."""
    return serve(random_checkpoint)


@pytest.mark.parametrize("script", ["g", "t", "c"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_js_037_the_end_tokens_of_all_files_count(serve, scripted_checkpoint, path, script) -> None:
    ends = {"g": "<end-g>", "t": EOS, "c": "<end-c>"}
    folder = scripted_checkpoint(
        **{name: [f"ok{name}", end, "more"] for name, end in ends.items()},
        options={
            "special": ENDS,
            "generation_config": {"eos_token_id": [FIRST_SPECIAL_ID]},
            "config": {"eos_token_id": FIRST_SPECIAL_ID + 1},
        },
    )
    body = {"prompt": f"<{script}>", "messages": [{"role": "user", "content": f"<{script}>"}]}
    reply = serve(folder).post(path, {**body, "max_tokens": 9, "temperature": 0}).json()
    (choice,) = reply["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert (text, choice["finish_reason"]) == (f"ok{script}", "stop")


@pytest.fixture(scope="module")
def padded_server(serve, tmp_path_factory):
    """A model whose logits are wider than its tokenizer: IDs from 300 on are not tokens."""
    folder = tmp_path_factory.mktemp("padded") / "padded"
    return serve(write_checkpoint(folder, tiny_config(), tokenizer=full_backend(300)))


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_js_060_ids_after_the_last_token_have_no_text(padded_server, path) -> None:
    ids = [*padded_server.tokenizer.encode("ab"), 505, 511]
    reply = padded_server.post(path, {"tokens": ids})
    assert (reply.status_code, reply.json()) == (200, {"prompt": "ab"})
    error = padded_server.refused(path, {"tokens": [512]})
    assert error["param"] == "tokens"
    body = {"logit_bias": {"505": 100}, "logprobs": 3, "return_token_ids": True, "max_tokens": 3}
    (choice,) = padded_server.complete(ids, **body)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [505, 505, 505])
    again = padded_server.complete([*ids, *choice["token_ids"]], max_tokens=1)
    assert again["usage"]["prompt_tokens"] == len(ids) + 3


def top_of(reply: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Returns (token, its logprob, top logprobs) for each position but the first of a prompt."""
    logprobs = reply["choices"][0]["logprobs"]
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    return [row for row in rows if row[2] is not None]


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("model", ["padded", "bytes"])
def test_js_067_tokens_with_one_text_do_not_replace_each_other(
    serve, padded_server, tmp_path_factory, model, k, rng
) -> None:
    server = padded_server
    if model == "bytes":  # <0x57> and W are different tokens with one text
        folder = tmp_path_factory.mktemp("spm") / "spm"
        server = serve(write_checkpoint(folder, tiny_config(), tokenizer=spm_backend()))
    prompt = [int(i) for i in rng.integers(0, 512, 40)]
    body = {"max_tokens": 0, "echo": True, "logprobs": k}
    by_name = top_of(server.complete(prompt, **body))
    by_id = top_of(server.complete(prompt, **body, return_tokens_as_token_ids=True))
    shared = 0
    for (token, logprob, top), (_, _, top_by_id) in zip(by_name, by_id, strict=True):
        assert sorted(top.values()) == sorted(top_by_id.values())
        assert top[token] == logprob
        assert len(top) >= k
        shared += any(name.startswith("token_id:") for name in top)
    assert shared > 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_pub_37_whole_floats_are_integers(server, path) -> None:
    start = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    body = {"top_k": 40, "max_tokens": 10, "seed": 3, "logit_bias": {"5": 1}, "min_tokens": 2}
    written = {"top_k": 40.0, "max_tokens": 1e1, "seed": 3.0, "min_tokens": 2.0}
    plain = server.post(path, {**start, **body}).json().get("choices")
    floats = server.post(path, {**start, **body, **written})
    assert floats.json().get("choices") == plain, floats.text
    for name, value in (("top_k", 40.5), ("seed", 1e30), ("max_tokens", "10"), ("n", True)):
        assert server.refused(path, {**start, name: value})["param"] == name


def test_pub_37_token_ids_may_be_whole_floats(server) -> None:
    more = {"max_tokens": 3, "temperature": 0, "stop_token_ids": [5.0], "return_token_ids": True}
    replies = [server.complete(prompt, **more) for prompt in ([1.0, 2.0], [1, 2], [[1.0, 2]])]
    assert len({str(reply["choices"]) for reply in replies}) == 1
    assert server.refused(COMPLETIONS, {"prompt": [1.0, 2.5]})["param"] == "prompt"
    tokens = server.post("/detokenize", {"tokens": [1.0, 2.0]}).json()
    assert tokens == server.post("/detokenize", {"tokens": [1, 2]}).json()
