"""Grammars for the text of an answer: checked at the door, followed token by token in the engine.

The work is llguidance's. What it builds is bounded by its own limits on the size of grammars and of
lexers, besides `MAX_GRAMMAR_CHARS` on their texts; but some of its work has no limit, such as that
for the multiples of a large number, which is why strangers' grammars are checked by a
`grammar_worker`. It fetches nothing that a schema refers to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Protocol

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import Grammar

MAX_CHOICES = 1024
LEXER_FUEL = 200_000
"""Work that llguidance may put into the lexer of a grammar: a tenth of a second. A fifth of its own
limit; schemas of hundreds of fields need far less."""

MAX_ROW_ITEMS, MAX_STEP_ITEMS = 2000, 50_000
"""States in which a parser may be at a time, and that it may go through for one token."""

MAX_ROW_ITEMS_OF_RULES, MAX_STEP_ITEMS_OF_RULES = 500, 10_000
"""The same for grammars of rules, which can be ambiguous: each state costs more the more there are,
so that with the limits above one token can take half a minute."""

NUM_TRIED_TOKENS = 16
"""Tokens of a grammar of rules that a check takes, to see that they do not take too long."""

MAX_MESSAGE_CHARS = 500

WHITESPACE = r" ?|\n( {0,12}|\t{0,6})"
"""Between the parts of JSON: little, or a model that likes it would spend its tokens on it."""

MAX_SPACES = 32
"""Bytes of whitespace in a row that JSON may have in its strings."""

_JSON_KINDS = ("json_object", "json_schema")


class TokenSource(Protocol):
    """What grammars need of a `Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        ...


def check_grammar(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Refuses a grammar that cannot be followed. There is no limit to the time that it can take.

    Args:
      grammar: what a request asks for.
      vocabulary: that of the engine which is to follow it. How much work a grammar is, and so
        whether it keeps within the limits, depends on the tokens.

    Raises:
      InvalidRequestError: it is malformed, uses something that is not supported, or matches no
        text; the message names the keyword or the trouble. ``param`` is None.
    """
    matcher = vocabulary.matcher(grammar)
    # Some troubles show when the first token is looked for, others when it has been taken.
    mask = np.zeros(vocabulary.num_words, np.uint32)
    if not matcher.is_error():
        vocabulary.fill(matcher, mask)
    if not matcher.is_error() and (token := vocabulary.first_allowed(mask)) is not None:
        matcher.consume_token(token)
    if matcher.is_error():
        raise InvalidRequestError(f"{name_of(grammar)}: {first_error(matcher)}")
    if grammar.kind == "grammar":
        _try_tokens(vocabulary, matcher, mask)


def _try_tokens(vocabulary: Vocabulary, matcher: LLMatcher, mask: np.ndarray) -> None:
    """Follows a grammar for some tokens, for the time that it takes and not for where it ends."""
    source = random.Random(0)
    for _ in range(NUM_TRIED_TOKENS):
        vocabulary.fill(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            return
        matcher.consume_token(int(source.choice(allowed)))


def to_llguidance(grammar: Grammar) -> str:
    """The form that llguidance takes.

    Raises:
      InvalidRequestError: the text of the grammar is not of its kind.
    """
    try:
        text = _of_kind(grammar)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name_of(grammar)}: {_shorten(str(error))}") from error
    if not grammar.frame:
        return text
    answer = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": grammar.frame}, {**answer, "name": "answer"}]})


def first_error(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, in few words."""
    # What follows is the state of the library, for its authors.
    message = matcher.get_error().partition("<state>")[0]
    if "initial_lexer_fuel" in message:
        return "it is too much work to compile"  # the library's words are about its own limits
    return "no text matches it" if message.strip() == "NoExtensionBias" else _shorten(message)


def is_json(grammar: Grammar) -> bool:
    """Whether every text that matches is JSON."""
    return grammar.kind in _JSON_KINDS


class Vocabulary:
    """The tokens of a model as grammars see them.

    Args:
      tokenizer: of the model.
      vocab_size: width of the logits. Further tokens do not exist; further logits are never
        allowed.

    Attributes:
      num_words: of 32 tokens each, in a mask over the tokens.
      eos_token_id: the token that stands for the end of the text.
      space_mask: u32[num_words], the tokens that begin with whitespace.
      space_lengths: for the tokens of nothing but whitespace, their length in bytes.
    """

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        size = min(tokenizer.vocab_size, vocab_size)
        self.special_ids = frozenset(i for i in tokenizer.special_ids if i < size)
        eos = tokenizer.eos_token_id
        # Something has to stand for the end, even if a request never samples it.
        other = max(self.special_ids, default=size - 1)
        self.eos_token_id = other if eos is None or eos >= size else eos
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.num_words = -(-size // 32)
        wrapper: Any = _Wrapper(tokenizer, self.tokens, self.eos_token_id, self.special_ids)
        self._backend = LLTokenizer(wrapper)
        starts = np.zeros(self.num_words * 32, np.uint8)
        self.space_lengths: dict[int, int] = {}
        for i, token in enumerate(self.tokens):
            starts[i] = token[:1].isspace()
            if starts[i] and token.isspace():
                self.space_lengths[i] = len(token)
        self.space_mask = np.packbits(starts, bitorder="little").view("<u4")

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Compiles a grammar, without the GIL. Trouble within it is in the matcher's state.

        Raises:
          InvalidRequestError: the text of the grammar is not of its kind.
        """
        has_rules = grammar.kind == "grammar"
        # With a frame it is two grammars, each of which has been checked by itself, and a little.
        fuel = 3 * LEXER_FUEL if grammar.frame else LEXER_FUEL
        limits = LLParserLimits(
            initial_lexer_fuel=fuel,
            max_items_in_row=MAX_ROW_ITEMS_OF_RULES if has_rules else MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS_OF_RULES if has_rules else MAX_STEP_ITEMS,
        )
        return LLMatcher(self._backend, to_llguidance(grammar), log_level=0, limits=limits)

    def fill(self, matcher: LLMatcher, mask: np.ndarray) -> None:
        """Sets what a matcher allows next in mask u32[num_words]."""
        fill_next_token_bitmask(matcher, mask.view(np.int32)[None])

    def first_allowed(self, mask: np.ndarray) -> int | None:
        """The lowest token in mask u32[num_words] that is not the end, or None."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return next((int(token) for token in allowed[:2] if token != self.eos_token_id), None)


class _Wrapper:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: TokenSource,
        tokens: Sequence[bytes],
        eos_token_id: int,
        special_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(special_ids | {eos_token_id})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _of_kind(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return _json_schema('{"type": "object"}')
        case "json_schema":
            return _json_schema(grammar.spec)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.spec)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(grammar.spec))
        case "grammar":
            return llguidance.grammar_from("grammar", grammar.spec)


def json_term(schema: dict[str, Any]) -> str:
    """What stands for JSON of a schema in a rule."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _json_schema(schema: str) -> str:
    if not isinstance(json.loads(schema), dict):
        raise ValueError("expected a JSON object")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _choice(spec: str) -> str:
    choices = json.loads(spec)
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise ValueError("expected a list of texts")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"expected 1 to {MAX_CHOICES} texts, got {len(choices)}")
    return "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)


def name_of(grammar: Grammar) -> str:
    """How a message that refuses a grammar names its kind to the one who sent it."""
    kinds = {"json_schema": "JSON schema", "json_object": "JSON object"}
    return f"the {kinds.get(grammar.kind, grammar.kind)} cannot be used"


def _shorten(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
