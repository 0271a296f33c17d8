"""The bytes that a token of a vocabulary stands for.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) write every byte as a letter of its own. Those in the
manner of sentencepiece (Llama 2, Mistral) write text, with a mark for a space, and have tokens such
as ``<0x0A>`` for bytes that no other token covers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError

SPACE_MARK = "\u2581"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_rule(backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    """How the bytes of a token follow from its name, and whether decoding strips a first space.

    Raises:
      CheckpointError: the backend decodes in a way that is not supported.
    """
    decoder: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    )
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level, False
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    only_spaces = all(pair == ({"String": SPACE_MARK}, " ") for pair in replaced)
    if only_spaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return _with_byte_fallback if "ByteFallback" in kinds else _spaced, strips
    raise CheckpointError(
        f"the tokenizer decodes with {sorted(kinds)}, which is not supported; expected byte-level "
        "or sentencepiece style"
    )


def byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the others are moved up from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(moved)
    }


_BYTE_OF = byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # not in the alphabet, so it can only be meant as it is written
        return token.encode()


def _spaced(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()


def _with_byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _spaced(token)
