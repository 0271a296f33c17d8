"""The grammar of a request: what the text of a completion must match."""

from __future__ import annotations

import typing
from typing import Literal, TypeAlias

import msgspec

from jaxserve.sampling_params.fields import require, require_at_most

MAX_GRAMMAR_CHARS = 2**18

Kind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
_KINDS = typing.get_args(Kind)


class Grammar(msgspec.Struct, frozen=True):
    """Constrains the content of a completion.

    Attributes:
      kind: the meaning of ``spec``.
      spec: for "json_schema" a JSON schema as JSON text, for "json_object" empty, for "regex" a
        regular expression, for "choice" a JSON array of the allowed strings, for "grammar" a
        grammar in Lark syntax or EBNF.
      structural_tag: a grammar in Lark syntax for the whole completion, in which ``@content``
        stands for the content. Empty if the content is the whole completion. See
        `structured_output.structural_tag`.

    Raises:
      InvalidRequestError: the kind is unknown, a field is not a string or has lone surrogates, or
        ``spec`` is longer than `MAX_GRAMMAR_CHARS`. `structured_output.grammar.check_grammar`
        checks the rest.
    """

    kind: Kind
    spec: str = ""
    structural_tag: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            expected = f"of the kind {', '.join(_KINDS)}"
            require(False, "grammar", expected, self.kind)
        for text in (self.spec, self.structural_tag):
            require(isinstance(text, str), "grammar", "a text", type(text).__name__)
            require(_is_unicode(text), "grammar", "text without lone surrogates", text[:100])
        require_at_most("grammar", len(self.spec), MAX_GRAMMAR_CHARS, "characters")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
