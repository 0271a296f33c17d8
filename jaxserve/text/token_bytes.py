"""Maps the name of a token in a vocabulary to the bytes that the token stands for.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) write every byte as one character. Sentencepiece
vocabularies (Llama 2, Mistral) write text, with `SPACE_MARK` for a space, and have tokens such as
``<0x0A>`` for bytes that no other token covers.

The `tokenizers` package has no public way to read how a tokenizer decodes. Only this module uses
the private one, ``decoder.__getstate__()``; pyproject.toml bounds the version of the package, and
tests/text/test_token_bytes.py fails if the state changes.
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
    """Reads from the decoder of a backend which bytes the name of a token stands for.

    Returns:
      (a function that turns the name of a token into its bytes, whether decoding strips a leading
      space).

    Raises:
      CheckpointError: the decoder of the backend is not supported.
    """
    decoder: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    )
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _byte_level, False
    replaced = [(part["pattern"], part["content"]) for part in parts if part["type"] == "Replace"]
    only_spaces = all(pair == ({"String": SPACE_MARK}, " ") for pair in replaced)
    if only_spaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(
            (part["type"] == "Strip" and part["content"] == " " and part["start"] == 1)
            or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
            for part in parts
        )
        return _with_byte_fallback if "ByteFallback" in kinds else _spaced, strips
    raise CheckpointError(
        f"the tokenizer decodes with {sorted(kinds)}, which is not supported; expected a "
        "byte-level or sentencepiece tokenizer"
    )


def byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each of the 256 characters of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes are written from U+0100 on.
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
    except KeyError:  # not in the alphabet, so the name is plain text
        return token.encode()


def _spaced(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()


def _with_byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _spaced(token)
