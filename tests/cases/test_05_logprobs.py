"""Log probabilities of answers and of echoed prompts, which evaluations are made from.

The numbers must be those of a reference that computes a whole text at once in float64.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.reference import Reference
from jaxserve.testing.scripted_checkpoint import EOS
from jaxserve.testing.tolerance import assert_close

EMOJI = "\N{FIRE}"
GREEK = ["alpha", " beta", " gamma", " delta"]
ARRAYS = {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


@pytest.fixture(scope="module")
def server(serve, rand):
    return serve(rand, block_size=4)


@pytest.fixture(scope="module")
def reference(rand: Path) -> Reference:
    return Reference(dict(open_checkpoint(str(rand)).tensors()))


@pytest.fixture(scope="module")
def scripted(serve, script):
    pieces = [bytes([byte]) for byte in EMOJI.encode()]
    return serve(script(greek=[*GREEK, EOS], emoji=[*pieces, "ok", EOS])).one_token_at_a_time()


def words(server, seed: int, count: int) -> list[int]:
    """Random tokens that are letters."""
    letters = [i for i in range(512) if server.tokenizer.token_bytes(i).isalpha()]
    return random.Random(seed).choices(letters, k=count)


def ask(server, prompt: Any, **body: Any) -> dict[str, Any]:
    """The reply of /v1/completions; the concatenated chunks of its stream must be the same."""
    reply = server.complete(prompt, **body)
    streamed = server.stream_complete(prompt, **body)
    assert streamed.done
    for choice in reply["choices"]:
        index = choice["index"]
        assert streamed.text(index) == choice["text"]
        assert streamed.finish_reason(index) == choice["finish_reason"]
        pieces = [piece["logprobs"] for piece in streamed.choices(index) if piece["logprobs"]]
        if choice["logprobs"] is None:
            assert pieces == []
        else:
            assert choice["logprobs"].keys() == ARRAYS
            joined = {key: [value for piece in pieces for value in piece[key]] for key in ARRAYS}
            assert joined == choice["logprobs"]
    return reply


def ask_chat(server, content: str, **body: Any) -> dict[str, Any]:
    """The choice of a chat; the concatenated entries of its stream must be the same."""
    (choice,) = server.chat(content, **body)["choices"]
    streamed = server.stream_chat(content, **body)
    pieces = [piece.get("logprobs") for piece in streamed.choices()]
    entries = [entry for piece in pieces if piece for entry in piece["content"]]
    if choice["logprobs"] is None:
        assert not any(pieces)
    else:
        assert choice["logprobs"]["content"] == entries
    return choice


def after_first(reference: Reference, tokens: Sequence[int]) -> np.ndarray:
    """The log probabilities of all tokens of a text but its first."""
    return reference.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def harness_scores(choice: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """Of a continuation, as lm-evaluation-harness reads them: its sum, and whether it is greedy."""
    values = choice["logprobs"]["token_logprobs"][context_length:-1]
    tops = choice["logprobs"]["top_logprobs"][context_length:-1]
    is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), is_greedy


HARNESS = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def test_js_064_the_prompt_is_scored_with_the_answer(server, reference) -> None:
    # The longest one takes several steps.
    prompts = [words(server, seed, length) for seed, length in enumerate([9, 2, 75])]
    context_lengths = [4, 1, 60]
    reply = ask(server, prompts, return_token_ids=True, **HARNESS)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for prompt, length, choice in zip(prompts, context_lengths, reply["choices"], strict=True):
        text = [*prompt, *reference.greedy(prompt, 1)]
        assert choice["token_ids"] == text[-1:]
        assert choice["text"] == server.tokenizer.decode(text)
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(text)}
        assert (arrays["token_logprobs"][0], arrays["top_logprobs"][0]) == (None, None)
        expected = after_first(reference, text)
        assert_close(arrays["token_logprobs"][1:], expected, num_tokens=len(text))
        total, _ = harness_scores(choice, length)
        assert total == pytest.approx(sum(arrays["token_logprobs"][length:-1]))
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("as_ids", [False, True])
def test_js_065_a_prompt_alone(server, reference, as_ids) -> None:
    text = "The capital of France is"
    tokens = server.tokenizer.encode(text)
    reply = ask(server, tokens if as_ids else text, echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    arrays = choice["logprobs"]
    assert {len(values) for values in arrays.values()} == {len(tokens)}
    assert (arrays["token_logprobs"][0], arrays["top_logprobs"][0]) == (None, None)
    expected = after_first(reference, tokens)
    assert_close(arrays["token_logprobs"][1:], expected, num_tokens=len(tokens))
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["prompt_tokens"] == len(tokens)
    server.good_request()


@pytest.mark.parametrize("k", [1, 3])
def test_js_066_the_token_is_among_the_likeliest_with_the_same_number(server, reference, k) -> None:
    context = words(server, 3, 6)
    greedy = reference.greedy(context, 20)
    other = [*greedy[:-1], (greedy[-1] + 1) % 512]
    prompts = [[*context, *greedy], [*context, *other]]
    reply = ask(server, prompts, **{**HARNESS, "logprobs": k})
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        text = [*prompt, *reference.greedy(prompt, 1)]
        arrays = choice["logprobs"]
        likeliest = np.argsort(-reference.logprobs(text), axis=-1, kind="stable")[:, :k]
        for i, token in enumerate(text[1:], 1):
            name, top = arrays["tokens"][i], arrays["top_logprobs"][i]
            # Exactly: the harness compares them with ==.
            assert top[name] == arrays["token_logprobs"][i]
            assert len(top) == k + (token not in likeliest[i - 1])
    assert [harness_scores(c, len(context))[1] for c in reply["choices"]] == [True, False]


def numbers(value: Any) -> list[float]:
    """All that are anywhere in the log probabilities of a choice, but for bytes and offsets."""
    if isinstance(value, dict):
        parts = [part for key, part in value.items() if key not in ("bytes", "text_offset")]
        return [number for part in parts for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


BOOLEAN = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1, "top_k": 1},
        {"temperature": 0, "logit_bias": {str(i): -100 for i in range(300)}},
        {"temperature": 0, "logit_bias": {"70": 100}},
        {"temperature": 0, "allowed_token_ids": [66, 67]},
        {"temperature": 1, "seed": 5, "response_format": BOOLEAN},
    ],
)
def test_js_068_excluded_tokens_have_finite_numbers(server, reference, path, more) -> None:
    body = {"max_tokens": 6, "return_token_ids": True, **more}
    if path == COMPLETIONS:
        body |= {"prompt": "a b", "echo": True, "logprobs": 5}
    else:
        body["messages"] = [{"role": "user", "content": "a b"}]
        body |= {"logprobs": True, "top_logprobs": 5}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    reply = json.loads(response.content, parse_constant=pytest.fail)
    (choice,) = reply["choices"]
    found = numbers(choice["logprobs"])
    assert len(found) > 5 * len(choice["token_ids"])
    assert all(-9999 <= number <= 0 for number in found)
    # They are those of the model, whatever was done to them before a token was chosen.
    prompt = (choice if path == COMPLETIONS else reply)["prompt_token_ids"]
    if path == COMPLETIONS:
        values = choice["logprobs"]["token_logprobs"][1:]
    else:
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = after_first(reference, [*prompt, *choice["token_ids"]])
    assert len(values) == (len(expected) if path == COMPLETIONS else len(choice["token_ids"]))
    assert_close(values, expected[-len(values) :], num_tokens=len(expected) + 1)


def test_js_070_no_alternatives_on_completions(server, reference) -> None:
    body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    (choice,) = ask(server, "a", logprobs=0, **body)["choices"]
    arrays = choice["logprobs"]
    prompt = server.tokenizer.encode("a")
    text = [*prompt, *reference.greedy(prompt, 3)]
    expected = after_first(reference, text)
    assert_close(arrays["token_logprobs"], expected, num_tokens=len(text))
    pairs = zip(arrays["tokens"], arrays["token_logprobs"], strict=True)
    assert arrays["top_logprobs"] == [{name: value} for name, value in pairs]


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 0}])
def test_js_071_no_alternatives_in_chats(scripted, more) -> None:
    choice = ask_chat(scripted, "<greek>", logprobs=True, max_tokens=3, **more)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == GREEK[:3]
    assert [entry["top_logprobs"] for entry in entries] == [[], [], []]
    assert all(entry["logprob"] <= 0 for entry in entries)


def test_js_072_null_alternatives_in_chats(scripted) -> None:
    body = {"max_tokens": 3, "top_logprobs": None}
    choice = ask_chat(scripted, "<greek>", logprobs=True, **body)
    entries = choice["logprobs"]["content"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in entries] == [
        (piece, []) for piece in GREEK[:3]
    ]
    assert ask_chat(scripted, "<greek>", logprobs=None, **body)["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "more", "param", "told"),
    [
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs", "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (CHAT, {"logprobs": True, "top_logprobs": 100_000}, "top_logprobs", "20"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "20"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "20"),
        (COMPLETIONS, {"logprobs": 100_000}, "logprobs", "20"),
        (COMPLETIONS, {"logprobs": -2}, "logprobs", "20"),
        (COMPLETIONS, {"logprobs": 21, "echo": True}, "logprobs", "20"),
    ],
)
def test_js_073_more_than_there_are(scripted, path, more, param, told) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    error = scripted.refused(path, {**body, **more, "max_tokens": 1})
    assert error["param"] == param
    assert told in error["message"]


def test_js_074_bytes_are_those_of_the_token(scripted) -> None:
    choice = ask_chat(scripted, "<emoji>", logprobs=True, top_logprobs=2, max_tokens=9)
    assert choice["message"]["content"] == EMOJI + "ok"
    *entries, end = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[240], [159], [148], [165], [111, 107]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == EMOJI + "ok"
    assert end["token"] == EOS
    for entry in entries:
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_js_075_alternatives_are_shown_each_by_itself(server, reference) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "max_tokens": 5}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    many = server.post(CHAT, {**body, "top_logprobs": 10}).json()
    few = server.post(CHAT, {**body, "top_logprobs": 3}).json()
    (choice,) = many["choices"]
    prompt, answer = many["prompt_token_ids"], choice["token_ids"]
    scores = reference.logprobs([*prompt, *answer])[len(prompt) - 1 : -1]
    likeliest = np.argsort(-scores, axis=-1, kind="stable")[:, :10]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(answer) == 5
    for entry, row, ids in zip(entries, scores, likeliest, strict=True):
        top = entry["top_logprobs"]
        expected = [list(server.tokenizer.token_bytes(int(i))) for i in ids]
        assert [alternative["bytes"] for alternative in top] == expected
        found = [alternative["logprob"] for alternative in top]
        assert_close(found, row[ids], num_tokens=len(prompt) + 5)
        assert len({alternative["token"] for alternative in top}) == 10
        for alternative in top:
            shown = bytes(alternative["bytes"]).decode("utf-8", "ignore")
            assert alternative["token"]
            assert "\N{REPLACEMENT CHARACTER}" not in alternative["token"]
            assert not shown or alternative["token"] == shown
    for entry, other in zip(entries, few["choices"][0]["logprobs"]["content"], strict=True):
        assert {**entry, "top_logprobs": entry["top_logprobs"][:3]} == other
    # The bytes of at least some are no character.
    shown = [a["token"] for entry in entries for a in entry["top_logprobs"]]
    assert any(token.startswith("\\x") for token in shown)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_js_076_offsets_are_places_in_the_text(scripted, echo, as_ids) -> None:
    text = "ab, cd.\n<greek>"
    prompt = scripted.tokenizer.encode(text) if as_ids else text
    (choice,) = ask(scripted, prompt, echo=echo, logprobs=1, max_tokens=4)["choices"]
    assert choice["text"] == (text if echo else "") + "".join(GREEK)
    offsets, tokens = (choice["logprobs"][key] for key in ("text_offset", "tokens"))
    assert offsets[0] == 0
    assert "".join(tokens) == choice["text"]
    for offset, token in zip(offsets, tokens, strict=True):
        assert choice["text"][offset:][: len(token)] == token


@pytest.mark.parametrize(
    "more", [{}, {"max_tokens": 0}, {"n": 2}, {"logprobs": 0}, {"logprobs": 5}]
)
def test_js_077_chunks_together_have_what_the_reply_has(server, scripted, more) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0, **more}
    for where, prompt in ((server, "ab cd"), (scripted, "ab cd<greek>")):
        reply = ask(where, prompt, **body)
        for choice in reply["choices"]:
            num_prompt = reply["usage"]["prompt_tokens"]
            num_answer = len(choice["logprobs"]["tokens"]) - num_prompt
            assert num_answer == reply["usage"]["completion_tokens"] / len(reply["choices"])
            assert choice["logprobs"]["text_offset"][num_prompt:][:1] in ([], [len(prompt)])


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_js_078_the_prompt_comes_once_for_each_answer(scripted, echo, logprobs, n) -> None:
    text = "ab cd<greek>"
    body = {"echo": echo, "logprobs": logprobs, "n": n, "max_tokens": 3, "temperature": 0}
    tokens = scripted.tokenizer.encode(text)
    for prompt in (text, tokens, [text, text], [tokens, tokens]):
        choices = ask(scripted, prompt, **body)["choices"]
        assert len(choices) == n * (1 if prompt in (text, tokens) else 2)
        for choice in choices:
            assert choice["text"] == (text if echo else "") + "alpha beta gamma"
            assert (choice["logprobs"] is None) == (logprobs is None)


@pytest.mark.parametrize("plain_first", [False, True])
def test_js_079_a_prompt_that_is_known_already(server, reference, plain_first) -> None:
    prompt = words(server, 20 + plain_first, 33)
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if plain_first:
        server.complete(prompt, **body)
    scored = [
        server.complete(prompt, echo=True, logprobs=1, **body)["choices"][0] for _ in range(3)
    ]
    assert scored[0]["logprobs"] == scored[1]["logprobs"] == scored[2]["logprobs"]
    text = [*prompt, *reference.greedy(prompt, 4)]
    assert scored[0]["token_ids"] == text[33:]
    values = scored[0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert_close(values[1:], after_first(reference, text), num_tokens=len(text))
    server.good_request()


@pytest.mark.parametrize("value", [True, False, "1", 1.5, [1], {}])
def test_js_082_logprobs_of_completions_is_a_number(scripted, value) -> None:
    for echo in (False, True):
        body = {"prompt": "a", "logprobs": value, "echo": echo, "max_tokens": 1}
        assert scripted.refused(COMPLETIONS, body)["param"] == "logprobs"


@pytest.mark.parametrize("k", [0, 2])
def test_js_083_each_endpoint_has_its_own_form(scripted, k) -> None:
    body = {"prompt": "<greek>", "logprobs": k, "max_tokens": 3}
    reply = scripted.post(COMPLETIONS, body)
    Completion.model_validate_json(reply.content, strict=True)
    for choice in scripted.stream(COMPLETIONS, body).choices():
        # The official types have no chunks of completions, whose finish_reason may be null.
        Logprobs.model_validate(choice["logprobs"], strict=True)
    scores = reply.json()["choices"][0]["logprobs"]
    assert scores.keys() == ARRAYS
    assert scores["tokens"] == GREEK[:3]

    body = {"messages": [{"role": "user", "content": "<greek>"}], "max_tokens": 3}
    body |= {"logprobs": True, "top_logprobs": k}
    reply = scripted.post(CHAT, body)
    ChatCompletion.model_validate_json(reply.content, strict=True)
    for chunk in scripted.stream(CHAT, body).chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    scores = reply.json()["choices"][0]["logprobs"]
    assert scores.keys() - {"refusal"} == {"content"}
    assert [entry["token"] for entry in scores["content"]] == GREEK[:3]
    for entry in scores["content"]:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == k
        for alternative in entry["top_logprobs"]:
            assert alternative.keys() == {"token", "logprob", "bytes"}
