"""Turns text into token IDs and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.text.model_files import check_file, read_text
from jaxserve.text.template_files import ChatTemplates, read_chat_templates
from jaxserve.text.token_bytes import byte_rule

MAX_IDS = 2**32
"""The backend accepts only IDs less than this."""


class TokenTextCache(dict[int, "str | bytes"]):
    """The text of each token, filled on first use.

    The text is a ``str`` if the bytes of the token are whole characters, else ``bytes``. Hidden
    tokens and unknown IDs have the text ``""``.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        data = b"" if token_id in self._hidden else self._token_bytes(token_id)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        if data:  # unknown IDs are unlimited in number, so they are not cached
            self[token_id] = piece
        return piece


class Tokenizer:
    """Encodes and decodes text, and knows the exact bytes of every token.

    Several threads may use it at once; encoding releases the GIL.

    Args:
      backend: a byte-level or sentencepiece tokenizer. It is modified: ``special_tokens`` become
        special in it, and it no longer truncates or pads.
      special_tokens: names as in tokenizer_config.json (``bos_token``...) -> text of the token.
      chat_templates: the chat templates of the model.
      add_bos: whether encoding puts the ``bos_token`` first; None: as the backend does.

    Attributes:
      special_tokens: as given.
      chat_templates: as given.
      special_ids: IDs of the tokens that `decode` leaves out of the text by default.

    Raises:
      CheckpointError: the decoder of the backend is not supported.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: ChatTemplates | None = None,
        add_bos: bool | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, special_tokens.values())
        self.special_tokens = dict(special_tokens)
        self.chat_templates = chat_templates or ChatTemplates()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._to_bytes, self._strips_first_space = byte_rule(backend)
        self._visible = TokenTextCache(self.token_bytes, self.special_ids)
        self._all = TokenTextCache(self.token_bytes, frozenset())
        self._prefix = self._find_prefix(add_bos)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and tokenizer_config.json.

        Without tokenizer.json, transformers converts the older files of the folder.

        Raises:
          CheckpointError: the folder has no tokenizer, or it cannot be read.
        """
        config = _read_json(folder / "tokenizer_config.json")
        if (folder / "tokenizer.json").exists():
            check_file(folder / "tokenizer.json")
            try:
                backend = Backend.from_file(str(folder / "tokenizer.json"))
            except Exception as error:  # the package raises plain Exception
                raise CheckpointError(f"{folder / 'tokenizer.json'} is damaged: {error}") from error
        else:
            backend = _convert_with_transformers(folder)
        names = {**_read_json(folder / "special_tokens_map.json"), **config}
        special_tokens = {
            name: text
            for name, value in names.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_templates=read_chat_templates(
                folder, config, _read_json(folder / "chat_template.json")
            ),
            add_bos=config.get("add_bos_token"),
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the template for chats without tools, or None."""
        return self.chat_templates.default

    @property
    def vocab_size(self) -> int:
        """Number of tokens. The logits of the model can be wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """ID of the token that begins a text, or None."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """ID of the token that ends a text, or None."""
        return self._special_id("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token IDs of a text. The text of a special token becomes that token.

        Args:
          text: any text without lone surrogates.
          add_special_tokens: begin with the special tokens that begin a text for this model. No end
            token is ever added, because no completion follows it.

        Raises:
          InvalidRequestError: the text has lone surrogates.
        """
        # Unlike `encode`, this method releases the GIL and computes no offsets.
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequestError(
                "the text is not valid Unicode: it has lone surrogates", param="prompt"
            ) from error
        return [*self._prefix, *encoding.ids] if add_special_tokens else encoding.ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence. Invalid bytes become U+FFFD.

        If encoding adds a space before the text, decoding removes that space. A `Detokenizer` keeps
        it, because its text continues a prompt.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(i) for i in ids if i not in hidden])
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to the text; empty for an unknown ID."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._backend.id_to_token(token_id) if 0 <= token_id < MAX_IDS else None
        return b"" if token is None else self._to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token; a part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_texts(self, *, skip_special_tokens: bool) -> TokenTextCache:
        """Returns the texts of all tokens by ID; hides special tokens if they are skipped."""
        return self._visible if skip_special_tokens else self._all

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _find_prefix(self, add_bos: bool | None) -> tuple[int, ...]:
        """Returns the special tokens that begin a text, as the backend or ``add_bos`` says."""
        if add_bos is not None:
            bos = self.bos_token_id
            return (bos,) if add_bos and bos is not None else ()
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
        raise CheckpointError("the tokenizer changes a text when it adds special tokens to it")


def _mark_special(backend: Backend, texts: Iterable[str]) -> None:
    """Makes known tokens special. Unknown tokens would get IDs that the model does not have."""
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in texts
            if text not in special and backend.token_to_id(text) is not None
        ]
    )


def _convert_with_transformers(folder: Path) -> Backend:
    """Converts older files (tokenizer.model, or vocab.json and merges.txt) to a fast tokenizer."""
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json")):
        raise CheckpointError(f"{folder} has no tokenizer: expected tokenizer.json")
    from transformers import AutoTokenizer  # takes seconds to import and is rarely needed

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        return tokenizer.backend_tokenizer
    except Exception as error:  # any error of the conversion is the fault of the files
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers cannot make one from its other "
            f"files: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is no such file.

    Raises:
      CheckpointError: the file cannot be read, or holds something else.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error!s:.200}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _token_text(value: Any) -> str | None:
    """Returns the text of a token from tokenizer_config.json: a string, or an object with one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
