"""GGUF tokenizers, compared with those that transformers builds from the same metadata."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer import Tokenizer

WORDS = """def main(argv: list[str]) -> int:|return x**2 + y_1;|if (a != b) { c = a ? d : e; }|
    <div class="x">&nbsp;</div>|SELECT * FROM t WHERE id='9';|don't|DON'T|we'll|I'VE|it's|'s|
    Hello|world|naïve|Ünïcödé|Größe|straße|Привет|мир|你好世界|こんにちは|カタカナ|안녕하세요|مرحبا|
    שלום|नमस्ते|ภาษาไทย|e\u0301|o\u0308|A\u030a|ﬁ|Ǆ|İ|🔥|👩‍👩‍👧|🇩🇪|🏽|\u200b|\ufeff|\u00a0|\u3000|\u2028|…|—|«»|“”|
    $|€|™|x²|½|Ⅷ|①|٣|৪|\t|\n|\r\n|\n\n\n|  |   |\t\t|\v|\x00|\x7f|\x85|http://a.b/c?d=e&f#g|a@b.co|
    CamelCaseWord|snake_case_word|SCREAMING|iPhone|McDonald|.|...|!?|,|;|()|[]|{}|//|/*|*/|#|@|~|`|^|\\|"""
WORDS_LIST = [word.strip(" ") for word in WORDS.replace("\n    ", "").split("|")]
NUMBERS = ["0", "7", "42", "1999", "3.14159", "1,000,000", "12345678901", "0x1F", "v2", "10%", "²"]


def strings(count: int, *, numbers: bool, seed: int = 0) -> list[str]:
    """Returns varied strings: words of many languages, code, spaces, emoji, random characters."""
    rng = random.Random(seed)
    words = WORDS_LIST + (NUMBERS * 4 if numbers else [])
    result = []
    for _ in range(count):
        parts = rng.choices(words, k=rng.randrange(1, 9))
        joined = rng.choice(["", " ", " ", "  ", "\n"]).join(parts)
        if rng.random() < 0.2:
            joined += "".join(chr(rng.choice([rng.randrange(0x3000), 0x1F600])) for _ in range(5))
        if rng.random() < 0.1:
            joined = " " + joined + " "
        if not numbers:
            joined = "".join(char for char in joined if not char.isnumeric())
        result.append(joined)
    return result


@pytest.fixture(scope="module")
def metadata(smollm2: Path) -> dict[str, Any]:
    return GGUFFile(smollm2).metadata


def transformers_backend(metadata: dict[str, Any]):
    """Returns the tokenizer that transformers builds from the metadata."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    fields = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    return convert_gguf_tokenizer("llama", fields)[0]


def check_equal(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    expected = [e.ids for e in theirs.encode_batch(texts, add_special_tokens=False)]
    for text, ids in zip(texts, expected, strict=True):
        assert ours.encode(text, add_special_tokens=False) == ids, text


def test_default_model_encodes_as_transformers_does(metadata: dict[str, Any]) -> None:
    # Without digits: transformers 5.24 does not know that "smollm" splits numbers (see below).
    texts = strings(2000, numbers=False)
    texts += [f"a<|im_start|>user\n{text}<|im_end|>\n<repo_name>x" for text in texts[:100]]
    ours = build_tokenizer(metadata)
    check_equal(ours, transformers_backend(metadata), texts)
    # The vocabulary lacks some control characters and bytes that begin no character in use.
    known = {ours.token_bytes(i) for i in range(17, 400)}
    complete = [text for text in texts if all(bytes([byte]) in known for byte in text.encode())]
    assert len(complete) > 1500
    for text in complete:
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_smollm_splits_digits(metadata: dict[str, Any]) -> None:
    ours = build_tokenizer(metadata)
    for text in strings(300, numbers=True):
        pieces = [ours.token_text(i) for i in ours.encode(text)]
        for piece in pieces:
            assert len(piece) == 1 or not any(char.isnumeric() for char in piece), (text, piece)
    assert [ours.token_text(i) for i in ours.encode("in 1234 ab5")] == [
        *("in", " ", "1", "2", "3", "4", " ab", "5")
    ]


@pytest.fixture(scope="module")
def greedy_metadata() -> dict[str, Any]:
    """Trains a vocabulary without a pre-tokenizer, so that a change of rule changes the tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(strings(1500, numbers=True, seed=2), trainer)
    model = json.loads(backend.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": sorted(model["vocab"], key=model["vocab"].get),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "default", None])
def test_pre_tokenizers_split_as_transformers_does(
    greedy_metadata: dict[str, Any], pre: str | None
) -> None:
    changed = {**greedy_metadata, "tokenizer.ggml.pre": pre}
    if pre is None:
        del changed["tokenizer.ggml.pre"]
    theirs = transformers_backend(changed)
    # The original tokenizers do this; transformers leaves it out when it reads a GGUF file.
    if pre in ("llama-bpe", "tekken"):
        theirs.model.ignore_merges = True
    if pre == "qwen2":
        theirs.normalizer = normalizers.NFC()
    check_equal(build_tokenizer(changed), theirs, strings(600, numbers=True, seed=1))


def test_pre_tokenizers_differ(greedy_metadata: dict[str, Any]) -> None:
    texts = strings(100, numbers=True, seed=3)

    def ids(pre: str) -> str:
        tokenizer = build_tokenizer({**greedy_metadata, "tokenizer.ggml.pre": pre})
        return str([tokenizer.encode(text) for text in texts])

    names = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")
    assert len({ids(name) for name in names}) == len(names)


def test_rejects_an_unknown_pre_tokenizer(metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="'who-knows' is not supported; expected one of"):
        build_tokenizer({**metadata, "tokenizer.ggml.pre": "who-knows"})
    assert "smollm" in PRE_TOKENIZERS


def test_tokens_and_template_of_the_default_model(metadata: dict[str, Any]) -> None:
    ours = build_tokenizer(metadata)
    assert ours.vocab_size == 49152
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    assert ours.special_ids == frozenset(range(17))
    assert ours.chat_template == metadata["tokenizer.chat_template"]
    assert ours.encode("") == []
    assert ours.token_bytes(0) == b"<|endoftext|>"


def test_reads_the_template_for_tools(metadata: dict[str, Any]) -> None:
    templates = build_tokenizer(
        {**metadata, "tokenizer.chat_template.tool_use": "tools"}
    ).chat_templates
    assert (templates.default, templates.tool_use) == (metadata["tokenizer.chat_template"], "tools")
    with pytest.raises(CheckpointError, match="must be a string"):
        build_tokenizer({**metadata, "tokenizer.chat_template.tool_use": 5})


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<s>", "</s>", "a", "b", "Ġ", "ab", "Ġab", "  ", "<t>"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 1, 1, 1, 1, 1, 4, 4],
        "merges": ["a b", "Ġ ab"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def test_finds_added_tokens_in_a_string() -> None:
    tokenizer = build_tokenizer(tiny_metadata())
    assert tokenizer.encode("ab<t>a  b</s>") == [5, 8, 2, 7, 3, 1]
    assert tokenizer.decode([5, 8, 2, 7, 3, 1]) == "ab<t>a  b"


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"pre": "llama-bpe"}, [0]),  # the default of llama.cpp for this rule
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"add_bos_token": True, "bos_token_id": None}, []),
        ({"add_eos_token": True}, []),  # ignored: a prompt must not end with it
    ],
)
def test_adds_the_bos_token_only_if_configured(changes: dict, first: list[int]) -> None:
    tokenizer = build_tokenizer(tiny_metadata(**changes))
    assert tokenizer.encode("ab") == [*first, 5]
    assert tokenizer.encode("ab", add_special_tokens=False) == [5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"model": "t5"}, "model 't5' is not supported"),
        ({"token_type": [1]}, "9 tokens, 9 of them distinct, 1 token types"),
        ({"tokens": ["a"] * 9}, "9 tokens, 1 of them distinct"),
        ({"merges": ["ab"]}, "'ab' is not a merge"),
        ({"merges": ["a b c"]}, "not a merge"),
        ({"merges": ["a z"]}, "damaged"),
        ({"model": "llama", "merges": None, "scores": [0.0]}, "9 tokens and 1 scores"),
    ],
)
def test_rejects_damaged_metadata(changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(tiny_metadata(**changes))


def sentencepiece_metadata(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Returns a vocabulary in which longer tokens can be merged in more than one way."""
    rng = random.Random(seed)
    letters = "▁abcdé"
    pieces = set(letters)
    while len(pieces) < 60:
        pieces.add("".join(rng.choices(sorted(pieces), k=2)))
    pieces = [piece for piece in sorted(pieces) if len(piece) <= 6]
    rng.shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, "[X]"]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))] + [0.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """Joins the adjacent tokens with the best score, leftmost first, until no pair is a token."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        best = max(
            (
                (scores[ids[a + b]], -at)
                for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
                if a + b in ids
            ),
            default=None,
        )
        if best is None:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    result = []
    for part in parts:
        result += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return result


@pytest.mark.parametrize("seed", range(4))
def test_sentencepiece_merges_by_score(seed: int) -> None:
    metadata = sentencepiece_metadata(seed)
    tokenizer = build_tokenizer(metadata)
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices("aabcdé  z🔥\n", k=rng.randrange(12)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_reference(metadata, text), text
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode([1, *ids]) == text


def test_sentencepiece_finds_special_and_user_tokens() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    user = len(metadata["tokenizer.ggml.tokens"]) - 1
    ids = tokenizer.encode("a</s>a[X]a", add_special_tokens=False)
    assert ids.count(2) == 1
    assert ids.count(user) == 1
    assert tokenizer.special_ids == {0, 1, 2}
    # Each piece between special tokens gets its own space, as in the original tokenizers.
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a</s> a[X] a"


def test_sentencepiece_can_omit_the_first_space() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    for text in ("ab", " ab", "  a b "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(tokenizer.encode("b", add_special_tokens=False)[0])[:1] == b"b"


def test_sentencepiece_encodes_as_transformers_does() -> None:
    # Leaves out strings that begin with a space or follow special tokens: transformers adds a space
    # only before the whole string, and none if it begins with one.
    metadata = sentencepiece_metadata(5)
    rng = random.Random(5)
    texts = ["a" + "".join(rng.choices("aabcdé  zü", k=rng.randrange(20))) for _ in range(300)]
    check_equal(build_tokenizer(metadata), transformers_backend(metadata), texts)


def test_sentencepiece_applies_merges_in_order() -> None:
    tokens = ["<unk>", "▁", "a", "b", "▁a", "ab"]
    kinds = [2, 1, 1, 1, 1, 1]
    for merges, expected in ((["▁ a", "a b"], ["▁a", "b"]), (["a b", "▁ a"], ["▁", "ab"])):
        fields = {"tokens": tokens, "token_type": kinds, "merges": merges, "scores": None}
        tokenizer = build_tokenizer(
            sentencepiece_metadata(**fields, bos_token_id=None, eos_token_id=None)
        )
        assert [tokens[i] for i in tokenizer.encode("ab")] == expected
