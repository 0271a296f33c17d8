"""Checkpoints with scripted output: the next token depends only on the last one.

Attention has no effect in these models, so they cannot test the KV cache.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.testing.tiny import scripted_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import (
    ADDED_TOKENS,
    SPECIAL_TOKENS,
    SPM_SPECIAL_TOKENS,
    spm_backend,
    tiny_backend,
)
from jaxserve.text.token_bytes import SPACE_MARK, byte_level_alphabet

VOCAB_SIZE = 512
EOS = SPECIAL_TOKENS["eos_token"]
SPM_EOS = SPM_SPECIAL_TOKENS["eos_token"]
EOS_ID = 257
FIRST_SPECIAL_ID = 260
CONTENT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Renders a chat as the contents of its messages, so the prompt ends with the last one."""

HISTORY_TEMPLATE = (
    "{% if tools %}[tools {% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}<{{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "{% if not m.tool_calls %}empty{% endif %}{% endif %}]{% endfor %}{# <tool_call> #}"
)
"""Renders a chat as its tools, roles, contents, reasoning, and earlier calls with arguments."""

Scripts = Mapping[str, Sequence[str | bytes]]


def write_scripted(
    folder: Path,
    scripts: Scripts,
    *,
    spm: bool = False,
    special: Sequence[str] = (),
    sharpness: float = 1.0,
    config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Writes a checkpoint with 512 tokens.

    Args:
      folder: created if missing.
      scripts: name -> pieces, each of which is one token. A prompt that ends with ``<name>``, which
        is one token too, is followed by the pieces. The last piece repeats for ever, so a script
        that ends needs `EOS` (or `SPM_EOS`) there. Over all scripts, a token has only one
        successor: a string that occurs twice must be cut into different pieces.
      spm: write a sentencepiece tokenizer instead of a byte-level one.
      special: further special tokens, which may be pieces. In a byte-level vocabulary their IDs
        start at `FIRST_SPECIAL_ID`.
      sharpness: see `scripted_tensors`. With 1, sampling at temperature 1 follows the script.
      config: keys to replace in config.json; None removes a key.
      tokenizer_config: keys to replace in tokenizer_config.json; None removes a key.
      **options: passed to `write_checkpoint`.

    Returns:
      ``folder``.
    """
    marks = {SPM_EOS if spm else EOS, *ADDED_TOKENS, *special}
    name_of = functools.partial(_name, marks=marks, spm=spm)
    names = {name_of(piece): None for script in scripts.values() for piece in script}
    unreachable = [*special, *(name for name in names if name not in marks)]
    backend = spm_backend(unreachable) if spm else tiny_backend((), unreachable=unreachable)
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    starts = [f"<{name}>" for name in scripts]
    backend.add_tokens([AddedToken(start, special=False, normalized=False) for start in starts])
    assert backend.get_vocab_size() <= VOCAB_SIZE, "too many pieces"
    special_tokens = SPM_SPECIAL_TOKENS if spm else SPECIAL_TOKENS
    values = {
        "hidden_size": VOCAB_SIZE,
        "bos_token_id": _id(backend, special_tokens["bos_token"]),
        "eos_token_id": _id(backend, special_tokens["eos_token"]),
        **(config or {}),
    }
    config = tiny_config(**values)
    lines = [
        [start, *map(name_of, scripts[name])] for name, start in zip(scripts, starts, strict=True)
    ]
    successors = _successors([[_id(backend, token) for token in line] for line in lines])
    return write_checkpoint(
        folder,
        config,
        scripted_tensors(config, successors, sharpness=sharpness),
        tokenizer=backend,
        tokenizer_config={
            **special_tokens,
            "chat_template": CONTENT_TEMPLATE,
            **(tokenizer_config or {}),
        },
        **options,
    )


def _successors(lines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Maps each token to its successor; the last token of a line succeeds itself."""
    successors: dict[int, int] = {}
    for line in lines:
        for token, successor in zip(line, [*line[1:], line[-1]], strict=True):
            known = successors.setdefault(token, successor)
            assert known == successor, f"token {token} has the successors {known} and {successor}"
    return successors


def _name(piece: str | bytes, *, marks: Collection[str], spm: bool) -> str:
    """Returns the name of a piece in the vocabulary."""
    if isinstance(piece, str) and (piece in marks or spm):
        return piece if piece in marks else piece.replace(" ", SPACE_MARK)
    if spm:
        (byte,) = piece
        return f"<0x{byte:02X}>"
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    data = piece.encode() if isinstance(piece, str) else piece
    return "".join(letters[byte] for byte in data)


def _id(backend: Backend, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None, f"there is no token {token!r}"
    return token_id
