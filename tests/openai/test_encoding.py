"""Replies are encoded in pieces that are short and join to the JSON of the whole."""

import random
import time
from typing import Any

import msgspec
import pytest

from jaxserve.openai.embeddings import Embedding as Vector
from jaxserve.openai.embeddings import EmbeddingsReply, EmbeddingUsage
from jaxserve.openai.encoding import PIECE_VALUES, as_json, encode_pieces, fits
from jaxserve.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from jaxserve.openai.responses_protocol import MessageItem, OutputText, TextLogprob
from jaxserve.testing.machine_speed import MAX_HOLD_S, PYTHON

HEAD = {"id": "x", "created": 1, "model": "m", "system_fingerprint": "f"}
USAGE = Usage(1, 2, 3, PromptTokensDetails(0))
NUM_TOKENS = 8000


def top() -> list[TopLogprob]:
    return [TopLogprob("tok", -1.25, [1, 2, 3]) for _ in range(20)]


def echo() -> Completion:
    tops: list[Any] = [None, *({f"t{i}": -1.5 for i in range(20)} for _ in range(NUM_TOKENS))]
    logprobs = CompletionLogprobs(
        text_offset=list(range(NUM_TOKENS + 1)),
        token_logprobs=[None, *[-0.123456] * NUM_TOKENS],
        tokens=["tok"] * (NUM_TOKENS + 1),
        top_logprobs=tops,
    )
    choices = [
        CompletionChoice(index=0, text="short"),
        CompletionChoice(index=1, text="tok" * NUM_TOKENS, logprobs=logprobs),
        CompletionChoice(index=2, text="", token_ids=list(range(300_000))),
    ]
    return Completion(object="text_completion", choices=choices, usage=USAGE, **HEAD)


def chat() -> ChatCompletion:
    content = [ChatTokenLogprob("tok", -1.5, [1, 2], top()) for _ in range(NUM_TOKENS)]
    vocabulary = {str(i): PromptLogprob(-2.5, i, f"t{i}") for i in range(50_000)}
    return ChatCompletion(
        choices=[ChatChoice(0, ChatMessage("a"), ChatLogprobs(content))],
        usage=USAGE,
        prompt_logprobs=[None, vocabulary, {}],
        **HEAD,
    )


def vectors() -> EmbeddingsReply:
    data = [Vector(i, [random.Random(i).gauss(0, 1)] * 4096) for i in range(200)]
    return EmbeddingsReply(data=data, model="m", usage=EmbeddingUsage(1, 1))


def item() -> MessageItem:
    logprobs = [TextLogprob("tok", -1.5, [1], top()) for _ in range(NUM_TOKENS)]
    return MessageItem("id", content=[OutputText("a", logprobs=logprobs)])


VALUES = {
    "echo": echo,
    "chat": chat,
    "vectors": vectors,
    "item": item,
    "text": lambda: {"prompt": "Việt \U0001f525" * 700_000},
    "controls": lambda: '"\x01\n' * 2_000_000,
    "token texts": lambda: {"tokens": list(range(10**6)), "token_strs": ["a"] * 300_000},
}


@pytest.mark.parametrize("name", VALUES)
def test_large_values_come_in_short_pieces(name) -> None:
    value = VALUES[name]()
    assert not fits(value)
    pieces: list[bytes] = []
    longest = []
    for _ in range(3):  # processor time of the slowest piece, in the best try
        pieces.clear()
        with PYTHON.measuring() as slowness:
            times, start = [], time.thread_time()
            for piece in encode_pieces(value):
                times.append(time.thread_time() - start)
                pieces.append(piece)
                start = time.thread_time()
        longest.append(max(times) / slowness.value)
    assert min(longest) < MAX_HOLD_S, longest
    assert b"".join(pieces) == msgspec.json.encode(value)
    assert len(pieces) > 3
    assert max(map(len, pieces)) < 2 * 2**20
    for piece in pieces:
        piece.decode()  # no character is cut


@pytest.mark.parametrize(
    "value", [None, 1, "a", [], {}, [1] * 1000, {"a": [1, {"b": None}]}, USAGE, ["a" * 1000] * 9]
)
def test_a_small_value_is_one_piece(value) -> None:
    assert fits(value)
    assert list(encode_pieces(value)) == [msgspec.json.encode(value)]


class Tagged(msgspec.Struct, tag="t", tag_field="kind", omit_defaults=True, rename="camel"):
    first_field: list[Any] | msgspec.UnsetType = msgspec.UNSET
    second_field: Any = None
    third_field: dict[Any, Any] = msgspec.field(default_factory=dict)


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(9 if depth else 3)
    if kind < 3:
        return rng.choice([None, True, 1.5, -7, 'a\0"\\é\U0001f525', "x" * rng.randrange(300)])
    if kind < 5:
        number = rng.choice([1, 0.5, None])
        return [number] * rng.choice([0, 3, 5, 8, PIECE_VALUES, 2 * PIECE_VALUES])
    children = [random_value(rng, depth - 1) for _ in range(rng.choice([0, 1, 3, 6]))]
    if kind < 7:
        return children
    if kind < 8:
        return {rng.choice([f'k"{i}', i]): child for i, child in enumerate(children)}
    return Tagged(children or msgspec.UNSET, random_value(rng, depth - 1), {"\0": children})


@pytest.mark.parametrize("seed", range(40))
def test_the_pieces_of_any_value_join_to_its_json(seed) -> None:
    rng = random.Random(seed)
    value = [random_value(rng, 3) for _ in range(12)]
    assert b"".join(encode_pieces(value)) == msgspec.json.encode(value)


def test_deep_values_are_not_cut() -> None:
    deep: Any = ["x"] * (PIECE_VALUES + 1)
    for _ in range(700):
        deep = {"a": [deep]}
    pieces = list(encode_pieces(deep))
    assert b"".join(pieces) == msgspec.json.encode(deep)


@pytest.mark.parametrize("value", [None, 1.5, "a", [0.25, -1.0], {"a": [1]}, top(), chat()])
def test_json_text_stands_for_a_value(value) -> None:
    whole = [value, {"x": value}]
    with_text = [as_json(value), {"x": as_json(value)}]
    assert b"".join(encode_pieces(with_text)) == msgspec.json.encode(whole)
