"""Log probabilities of completions and of echoed prompts, which evaluations depend on.

The expected values come from a reference that computes a whole sequence at once in float64.
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
def server(serve, random_checkpoint):
    return serve(random_checkpoint, block_size=4)


@pytest.fixture(scope="module")
def reference(random_checkpoint: Path) -> Reference:
    return Reference(dict(open_checkpoint(str(random_checkpoint)).tensors()))


@pytest.fixture(scope="module")
def scripted_server(serve, scripted_checkpoint):
    pieces = [bytes([byte]) for byte in EMOJI.encode()]
    return serve(
        scripted_checkpoint(greek=[*GREEK, EOS], emoji=[*pieces, "ok", EOS])
    ).with_one_token_per_output()


def random_letters(server, seed: int, count: int) -> list[int]:
    """Returns random tokens that consist of letters."""
    letters = [i for i in range(512) if server.tokenizer.token_bytes(i).isalpha()]
    return random.Random(seed).choices(letters, k=count)


def complete(server, prompt: Any, **body: Any) -> dict[str, Any]:
    """Returns a reply of /v1/completions; asserts that the joined chunks of a stream equal it."""
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


def chat(server, content: str, **body: Any) -> dict[str, Any]:
    """Returns the only choice of a chat; asserts that a stream has the same log probabilities."""
    (choice,) = server.chat(content, **body)["choices"]
    streamed = server.stream_chat(content, **body)
    pieces = [piece.get("logprobs") for piece in streamed.choices()]
    entries = [entry for piece in pieces if piece for entry in piece["content"]]
    if choice["logprobs"] is None:
        assert not any(pieces)
    else:
        assert choice["logprobs"]["content"] == entries
    return choice


def logprobs_after_first(reference: Reference, tokens: Sequence[int]) -> np.ndarray:
    """Returns the log probabilities of all tokens of a sequence except the first."""
    return reference.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def harness_scores(choice: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """Returns the sum of a continuation and whether it is greedy, as lm-evaluation-harness does."""
    values = choice["logprobs"]["token_logprobs"][context_length:-1]
    tops = choice["logprobs"]["top_logprobs"][context_length:-1]
    is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), is_greedy


HARNESS_OPTIONS = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def test_js_064_echo_scores_the_prompt_and_the_completion(server, reference) -> None:
    # The longest prompt takes several steps.
    prompts = [random_letters(server, seed, length) for seed, length in enumerate([9, 2, 75])]
    context_lengths = [4, 1, 60]
    reply = complete(server, prompts, return_token_ids=True, **HARNESS_OPTIONS)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for prompt, length, choice in zip(prompts, context_lengths, reply["choices"], strict=True):
        sequence = [*prompt, *reference.greedy(prompt, 1)]
        assert choice["token_ids"] == sequence[-1:]
        assert choice["text"] == server.tokenizer.decode(sequence)
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(sequence)}
        assert (arrays["token_logprobs"][0], arrays["top_logprobs"][0]) == (None, None)
        expected = logprobs_after_first(reference, sequence)
        assert_close(arrays["token_logprobs"][1:], expected, num_tokens=len(sequence))
        total, _ = harness_scores(choice, length)
        assert total == pytest.approx(sum(arrays["token_logprobs"][length:-1]))
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("as_ids", [False, True])
def test_js_065_a_prompt_is_scored_without_a_completion(server, reference, as_ids) -> None:
    text = "The capital of France is"
    tokens = server.tokenizer.encode(text)
    reply = complete(server, tokens if as_ids else text, echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    arrays = choice["logprobs"]
    assert {len(values) for values in arrays.values()} == {len(tokens)}
    assert (arrays["token_logprobs"][0], arrays["top_logprobs"][0]) == (None, None)
    expected = logprobs_after_first(reference, tokens)
    assert_close(arrays["token_logprobs"][1:], expected, num_tokens=len(tokens))
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["prompt_tokens"] == len(tokens)
    server.good_request()


@pytest.mark.parametrize("k", [1, 3])
def test_js_066_the_token_has_the_same_value_in_top_logprobs(server, reference, k) -> None:
    context = random_letters(server, 3, 6)
    greedy = reference.greedy(context, 20)
    other = [*greedy[:-1], (greedy[-1] + 1) % 512]
    prompts = [[*context, *greedy], [*context, *other]]
    reply = complete(server, prompts, **{**HARNESS_OPTIONS, "logprobs": k})
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        sequence = [*prompt, *reference.greedy(prompt, 1)]
        arrays = choice["logprobs"]
        top_ids = np.argsort(-reference.logprobs(sequence), axis=-1, kind="stable")[:, :k]
        for position, token in enumerate(sequence[1:], 1):
            name, top = arrays["tokens"][position], arrays["top_logprobs"][position]
            # Exactly equal, because the harness compares them with ==.
            assert top[name] == arrays["token_logprobs"][position]
            assert len(top) == k + (token not in top_ids[position - 1])
    assert [harness_scores(c, len(context))[1] for c in reply["choices"]] == [True, False]


def numbers(value: Any) -> list[float]:
    """Returns all numbers in the log probabilities of a choice, except bytes and offsets."""
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
def test_js_068_logprobs_of_excluded_tokens_are_finite(server, reference, path, more) -> None:
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
    # They are the log probabilities of the model, before logits processors and sampling filters.
    prompt = (choice if path == COMPLETIONS else reply)["prompt_token_ids"]
    if path == COMPLETIONS:
        values = choice["logprobs"]["token_logprobs"][1:]
    else:
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = logprobs_after_first(reference, [*prompt, *choice["token_ids"]])
    assert len(values) == (len(expected) if path == COMPLETIONS else len(choice["token_ids"]))
    assert_close(values, expected[-len(values) :], num_tokens=len(expected) + 1)


def test_js_070_logprobs_0_has_the_sampled_token_only(server, reference) -> None:
    body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    (choice,) = complete(server, "a", logprobs=0, **body)["choices"]
    arrays = choice["logprobs"]
    prompt = server.tokenizer.encode("a")
    sequence = [*prompt, *reference.greedy(prompt, 3)]
    expected = logprobs_after_first(reference, sequence)
    assert_close(arrays["token_logprobs"], expected, num_tokens=len(sequence))
    pairs = zip(arrays["tokens"], arrays["token_logprobs"], strict=True)
    assert arrays["top_logprobs"] == [{name: value} for name, value in pairs]


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 0}])
def test_js_071_chats_have_no_alternatives_by_default(scripted_server, more) -> None:
    choice = chat(scripted_server, "<greek>", logprobs=True, max_tokens=3, **more)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == GREEK[:3]
    assert [entry["top_logprobs"] for entry in entries] == [[], [], []]
    assert all(entry["logprob"] <= 0 for entry in entries)


def test_js_072_null_top_logprobs_means_no_alternatives(scripted_server) -> None:
    body = {"max_tokens": 3, "top_logprobs": None}
    choice = chat(scripted_server, "<greek>", logprobs=True, **body)
    entries = choice["logprobs"]["content"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in entries] == [
        (piece, []) for piece in GREEK[:3]
    ]
    assert chat(scripted_server, "<greek>", logprobs=None, **body)["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "more", "param", "word"),
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
def test_js_073_invalid_numbers_of_logprobs_are_refused(
    scripted_server, path, more, param, word
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    error = scripted_server.refused(path, {**body, **more, "max_tokens": 1})
    assert error["param"] == param
    assert word in error["message"]


def test_js_074_each_entry_has_the_bytes_of_its_token(scripted_server) -> None:
    choice = chat(scripted_server, "<emoji>", logprobs=True, top_logprobs=2, max_tokens=9)
    assert choice["message"]["content"] == EMOJI + "ok"
    *entries, end = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[240], [159], [148], [165], [111, 107]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == EMOJI + "ok"
    assert end["token"] == EOS
    for entry in entries:
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_js_075_alternatives_are_decoded_independently(server, reference) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "max_tokens": 5}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    many = server.post(CHAT, {**body, "top_logprobs": 10}).json()
    few = server.post(CHAT, {**body, "top_logprobs": 3}).json()
    (choice,) = many["choices"]
    prompt, completion = many["prompt_token_ids"], choice["token_ids"]
    scores = reference.logprobs([*prompt, *completion])[len(prompt) - 1 : -1]
    top_ids = np.argsort(-scores, axis=-1, kind="stable")[:, :10]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(completion) == 5
    for entry, row, ids in zip(entries, scores, top_ids, strict=True):
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
    # The bytes of some tokens are not a whole character.
    shown = [a["token"] for entry in entries for a in entry["top_logprobs"]]
    assert any(token.startswith("\\x") for token in shown)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_js_076_text_offsets_are_positions_in_the_text(scripted_server, echo, as_ids) -> None:
    text = "ab, cd.\n<greek>"
    prompt = scripted_server.tokenizer.encode(text) if as_ids else text
    (choice,) = complete(scripted_server, prompt, echo=echo, logprobs=1, max_tokens=4)["choices"]
    assert choice["text"] == (text if echo else "") + "".join(GREEK)
    offsets, tokens = (choice["logprobs"][key] for key in ("text_offset", "tokens"))
    assert offsets[0] == 0
    assert "".join(tokens) == choice["text"]
    for offset, token in zip(offsets, tokens, strict=True):
        assert choice["text"][offset:][: len(token)] == token


@pytest.mark.parametrize(
    "more", [{}, {"max_tokens": 0}, {"n": 2}, {"logprobs": 0}, {"logprobs": 5}]
)
def test_js_077_joined_chunks_equal_the_reply(server, scripted_server, more) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0, **more}
    for target, prompt in ((server, "ab cd"), (scripted_server, "ab cd<greek>")):
        reply = complete(target, prompt, **body)
        for choice in reply["choices"]:
            num_prompt = reply["usage"]["prompt_tokens"]
            num_completion = len(choice["logprobs"]["tokens"]) - num_prompt
            assert num_completion == reply["usage"]["completion_tokens"] / len(reply["choices"])
            assert choice["logprobs"]["text_offset"][num_prompt:][:1] in ([], [len(prompt)])


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_js_078_the_prompt_is_echoed_once_in_each_choice(
    scripted_server, echo, logprobs, n
) -> None:
    text = "ab cd<greek>"
    body = {"echo": echo, "logprobs": logprobs, "n": n, "max_tokens": 3, "temperature": 0}
    tokens = scripted_server.tokenizer.encode(text)
    for prompt in (text, tokens, [text, text], [tokens, tokens]):
        choices = complete(scripted_server, prompt, **body)["choices"]
        assert len(choices) == n * (1 if prompt in (text, tokens) else 2)
        for choice in choices:
            assert choice["text"] == (text if echo else "") + "alpha beta gamma"
            assert (choice["logprobs"] is None) == (logprobs is None)


@pytest.mark.parametrize("plain_first", [False, True])
def test_js_079_repeating_a_prompt_does_not_change_its_scores(
    server, reference, plain_first
) -> None:
    prompt = random_letters(server, 20 + plain_first, 33)
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if plain_first:
        server.complete(prompt, **body)
    scored = [
        server.complete(prompt, echo=True, logprobs=1, **body)["choices"][0] for _ in range(3)
    ]
    assert scored[0]["logprobs"] == scored[1]["logprobs"] == scored[2]["logprobs"]
    sequence = [*prompt, *reference.greedy(prompt, 4)]
    assert scored[0]["token_ids"] == sequence[33:]
    values = scored[0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert_close(values[1:], logprobs_after_first(reference, sequence), num_tokens=len(sequence))
    server.good_request()


@pytest.mark.parametrize("value", [True, False, "1", 1.5, [1], {}])
def test_js_082_logprobs_that_are_not_an_integer_are_refused(scripted_server, value) -> None:
    for echo in (False, True):
        body = {"prompt": "a", "logprobs": value, "echo": echo, "max_tokens": 1}
        assert scripted_server.refused(COMPLETIONS, body)["param"] == "logprobs"


@pytest.mark.parametrize("k", [0, 2])
def test_js_083_logprobs_have_the_format_of_the_endpoint(scripted_server, k) -> None:
    body = {"prompt": "<greek>", "logprobs": k, "max_tokens": 3}
    reply = scripted_server.post(COMPLETIONS, body)
    Completion.model_validate_json(reply.content, strict=True)
    for choice in scripted_server.stream(COMPLETIONS, body).choices():
        # The client has no type for chunks of completions, whose finish_reason may be null.
        Logprobs.model_validate(choice["logprobs"], strict=True)
    scores = reply.json()["choices"][0]["logprobs"]
    assert scores.keys() == ARRAYS
    assert scores["tokens"] == GREEK[:3]

    body = {"messages": [{"role": "user", "content": "<greek>"}], "max_tokens": 3}
    body |= {"logprobs": True, "top_logprobs": k}
    reply = scripted_server.post(CHAT, body)
    ChatCompletion.model_validate_json(reply.content, strict=True)
    for chunk in scripted_server.stream(CHAT, body).chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    scores = reply.json()["choices"][0]["logprobs"]
    assert scores.keys() - {"refusal"} == {"content"}
    assert [entry["token"] for entry in scores["content"]] == GREEK[:3]
    for entry in scores["content"]:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == k
        for alternative in entry["top_logprobs"]:
            assert alternative.keys() == {"token", "logprob", "bytes"}
