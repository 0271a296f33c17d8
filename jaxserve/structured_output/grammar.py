"""Turns the grammar of a request into a matcher of llguidance, and checks whether that works.

Compiling is bounded by llguidance's limits on the size of grammars and lexers, and by
`MAX_GRAMMAR_CHARS`. Some of its work has no limit, such as compiling multiples of a large number,
so a `GrammarWorker` checks the grammars of requests. llguidance fetches nothing that a schema
refers to.
"""

from __future__ import annotations

import json
import random
import time

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.json_schema import prepared
from jaxserve.structured_output.lark_rules import endless_rule
from jaxserve.structured_output.vocabulary import Vocabulary, tokens_in

MAX_CHOICES = 1024
LEXER_FUEL = 200_000
"""Work that llguidance may spend on the lexer of a grammar, about 0.1 s. This is a fifth of its own
limit; schemas with hundreds of fields need far less."""

MAX_ROW_ITEMS, MAX_STEP_ITEMS = 2000, 50_000
"""Maximum number of parser states at one position, and during one token."""

MAX_ROW_ITEMS_OF_RULES, MAX_STEP_ITEMS_OF_RULES = 500, 10_000
"""The same limits for grammars of rules, which can be ambiguous: the cost of a state grows with the
number of states, and with the limits above one token can take half a minute."""

NUM_TRIED_TEXTS, NUM_TRIED_TOKENS = 4, 64
"""Number of random texts that a check generates, and of tokens in each. Some grammars fail, or get
too slow, only after a few tokens."""

TRY_TIME_S = 0.25
"""Processor time after which a check generates no more, unless the grammar has rules: one with many
ambiguities can be that slow at every token, and the check has to take too long then."""

NUM_RULE_TOKENS = 16
"""Tokens that a check of a grammar of rules always generates."""

MAX_MESSAGE_CHARS = 500

WHITESPACE = r" ?|\n( {0,12}|\t{0,6})"
"""Whitespace between the parts of JSON. It is bounded because some models generate it endlessly."""

MAX_SPACES = 32
"""Maximum number of successive whitespace bytes in JSON, strings included."""

_CLOSING, _SEPARATING, _SPACES = b"}]", b'",:', b" \t\n\r"

_JSON_KINDS = ("json_object", "json_schema")


def check_grammar(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Raises InvalidRequestError unless a completion can follow the grammar.

    The time that this takes has no limit.

    Args:
      grammar: the grammar of a request.
      vocabulary: the vocabulary of the engine. The work that a grammar takes, and so whether it
        stays within the limits, depends on the tokens.

    Raises:
      InvalidRequestError: the grammar is malformed, uses an unsupported feature, or matches no
        text; the message names the keyword or the problem. ``param`` is None.
    """
    matcher = make_matcher(grammar, vocabulary)
    _raise_error_of(matcher, grammar)
    if grammar.kind == "grammar" and (rule := endless_rule(_lark_in(_of_kind(grammar)))):
        raise InvalidRequestError(
            f"{name_of(grammar)}: no text of finite length matches the rule {rule[:100]!r}"
        )
    source = random.Random(0)
    end = time.thread_time() + TRY_TIME_S
    for i in range(NUM_TRIED_TEXTS):
        copy, goes_on = matcher.deep_copy(), i % 2 == 1
        _try_text(grammar, vocabulary, copy, source, goes_on=goes_on, end=end, is_first=i == 0)


def _try_text(
    grammar: Grammar,
    vocabulary: Vocabulary,
    matcher: LLMatcher,
    source: random.Random,
    *,
    goes_on: bool,
    end: float,
    is_first: bool,
) -> None:
    """Generates a random text as an engine would. Raises InvalidRequestError if that fails."""
    mask = np.zeros(vocabulary.num_words, np.uint32)
    for i in range(NUM_TRIED_TOKENS):
        must_go_on = is_first and (i == 0 or (i < NUM_RULE_TOKENS and grammar.kind == "grammar"))
        if matcher.is_stopped() or (time.thread_time() > end and not must_go_on):
            break
        vocabulary.fill(matcher, mask)
        _raise_error_of(matcher, grammar, has_text=i > 0)
        token = _random_token(vocabulary, tokens_in(mask), source, goes_on=goes_on)
        matcher.consume_token(token)
    _raise_error_of(matcher, grammar, has_text=True)


def _random_token(
    vocabulary: Vocabulary, allowed: np.ndarray, source: random.Random, *, goes_on: bool
) -> int:
    """Returns a random token.

    Its first byte is drawn before the rest, because most tokens are words, and a token drawn among
    all would rarely be anything else. White space comes last. A text that ``goes_on`` closes
    nothing while it can add something; another one often closes what is open.
    """
    first = vocabulary.first_bytes[allowed]
    choices = _without(np.unique(first), _SPACES)
    if goes_on:
        choices = _without(_without(choices, _CLOSING), _SEPARATING)
    elif source.random() < 0.5:
        ends = choices[np.isin(choices, [*_CLOSING, *_SEPARATING])]
        choices = ends if len(ends) else choices
    return int(source.choice(allowed[first == source.choice(choices)]))


def _without(choices: np.ndarray, some: bytes) -> np.ndarray:
    """Returns the bytes that are not in ``some``, unless none is left."""
    rest = choices[~np.isin(choices, list(some))]
    return rest if len(rest) else choices


def _raise_error_of(matcher: LLMatcher, grammar: Grammar, *, has_text: bool = False) -> None:
    if matcher.is_error():
        error = first_error(matcher, has_text=has_text)
        raise InvalidRequestError(f"{name_of(grammar)}: {error}")


def make_matcher(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher:
    """Compiles a grammar; releases the GIL. See `Vocabulary.matcher`.

    Raises:
      InvalidRequestError: ``spec`` does not fit the kind of the grammar.
    """
    has_rules = grammar.kind == "grammar"
    # A structural tag adds a second grammar. Both were checked separately, so three times the fuel
    # is enough for the two together.
    limits = LLParserLimits(
        initial_lexer_fuel=3 * LEXER_FUEL if grammar.structural_tag else LEXER_FUEL,
        max_items_in_row=MAX_ROW_ITEMS_OF_RULES if has_rules else MAX_ROW_ITEMS,
        step_max_items=MAX_STEP_ITEMS_OF_RULES if has_rules else MAX_STEP_ITEMS,
    )
    return vocabulary.matcher(_to_llguidance(grammar), limits)


def first_error(matcher: LLMatcher, *, has_text: bool = False) -> str:
    """Returns a short message about the error of a matcher; "" if there is no error.

    Args:
      matcher: a matcher.
      has_text: whether it has taken tokens.
    """
    # The text after <state> is the internal state of llguidance.
    message = matcher.get_error().partition("<state>")[0]
    if "initial_lexer_fuel" in message:
        return "it is too much work to compile"  # llguidance's message names its own options
    if "coerce_one_of" in message:
        return "a value can match several schemas of a oneOf; use anyOf, or make them exclusive"
    if message.strip() == "NoExtensionBias":
        return "nothing can follow part of a text" if has_text else "no text matches it"
    return _shorten(message)


def is_json(grammar: Grammar) -> bool:
    """Returns True if every text that matches is JSON."""
    return grammar.kind in _JSON_KINDS


def name_of(grammar: Grammar) -> str:
    """Returns the beginning of a message that refuses a grammar."""
    kinds = {"json_schema": "JSON schema", "json_object": "JSON object"}
    return f"the {kinds.get(grammar.kind, grammar.kind)} cannot be used"


def _to_llguidance(grammar: Grammar) -> str:
    """Returns the source for llguidance: the grammar, inside its structural tag if it has one."""
    try:
        text = _of_kind(grammar)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name_of(grammar)}: {_shorten(str(error))}") from error
    tag = grammar.structural_tag
    if not tag:
        return text
    content = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": tag}, {**content, "name": "content"}]})


def _lark_in(source: str) -> str:
    """Returns the Lark text in the source of a grammar of rules."""
    return json.loads(source)["grammars"][0]["lark_grammar"] if source.startswith("{") else source


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


def _json_schema(schema: str) -> str:
    given = json.loads(schema)
    if not isinstance(given, dict):
        raise ValueError("expected a JSON object")
    ready = prepared(given)
    if not isinstance(ready, dict):
        raise ValueError("no finite value matches it")
    return LLMatcher.grammar_from_json_schema(ready, overrides={"whitespace_pattern": WHITESPACE})


def _choice(spec: str) -> str:
    choices = json.loads(spec)
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise ValueError("expected a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"expected 1 to {MAX_CHOICES} strings, got {len(choices)}")
    return "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)


def _shorten(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
