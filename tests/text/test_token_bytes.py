"""The private state of decoders in the tokenizers package, as token_bytes.py expects it."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from jaxserve.text.token_bytes import SPACE_MARK, byte_rule

SENTENCEPIECE = [
    decoders.Replace(SPACE_MARK, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.ByteLevel(), {"type": "ByteLevel"}),
        (decoders.ByteFallback(), {"type": "ByteFallback"}),
        (decoders.Fuse(), {"type": "Fuse"}),
        (decoders.Strip(" ", 1, 0), {"type": "Strip", "content": " ", "start": 1}),
        (decoders.Metaspace(), {"type": "Metaspace", "prepend_scheme": "always"}),
        (
            decoders.Replace(SPACE_MARK, " "),
            {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        ),
        (decoders.WordPiece(), {"type": "WordPiece"}),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_a_decoder_has_the_expected_state(decoder: Any, expected: dict[str, Any]) -> None:
    state = json.loads(decoder.__getstate__())
    assert {**state, **expected} == state, (
        "the tokenizers package changed the state of its decoders: adapt text/token_bytes.py"
    )


def test_a_sequence_has_the_states_of_its_decoders() -> None:
    state = json.loads(decoders.Sequence(SENTENCEPIECE).__getstate__())
    parts = [json.loads(decoder.__getstate__()) for decoder in SENTENCEPIECE]
    assert state == {"type": "Sequence", "decoders": parts}


def backend_with(decoder: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoder
    return backend


@pytest.mark.parametrize(
    ("decoder", "name", "data", "strips"),
    [
        (decoders.ByteLevel(), "Ġé", b" \xe9", False),
        (decoders.ByteLevel(), "日", "日".encode(), False),
        (decoders.Sequence(SENTENCEPIECE), "<0x0A>", b"\n", True),
        (decoders.Sequence(SENTENCEPIECE), "▁a", b" a", True),
        (decoders.Metaspace(), "▁a", b" a", True),
        (decoders.Metaspace(prepend_scheme="never"), "<0x0A>", b"<0x0A>", False),
    ],
)
def test_byte_rule_finds_the_bytes_of_a_token(
    decoder: Any, name: str, data: bytes, strips: bool
) -> None:
    to_bytes, strips_first_space = byte_rule(backend_with(decoder))
    assert (to_bytes(name), strips_first_space) == (data, strips)
