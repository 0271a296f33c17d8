"""The sampling parameters of a request. Construction validates them."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this takes the most likely token."""

TEMPERATURES = (0.01, 1e6)
REPETITION_PENALTIES = (1e-6, 1e6)
"""The ranges that an engine computes with. Values outside them would make float32 logits infinite
or NaN, so `SamplingParams.normalised` clips them.
"""

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
ALL_LOGPROBS = -1
"""The count that asks for log probabilities of the whole vocabulary."""
MAX_LOGIT_BIAS = 2**18
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_CHARS = 2**18
BIAS_LIMIT = 100.0
"""Larger biases act like this one, as in the OpenAI API."""
IDS_AT_ONCE = 2**16
"""Number of token IDs that one call checks. No other thread can interrupt it, for about 2 ms."""
INT64 = (-(2**63), 2**63 - 1)


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
      InvalidRequestError: ``spec`` is longer than `MAX_GRAMMAR_CHARS`.
        `structured_output.grammar.check_grammar` checks the rest.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    spec: str = ""
    structural_tag: str = ""

    def __post_init__(self) -> None:
        _require_at_most("grammar", len(self.spec), MAX_GRAMMAR_CHARS, "characters")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with the names and defaults of the OpenAI API and of vLLM.

    Construction validates all fields as far as possible without the model; `check_token_ids` checks
    token IDs against the vocabulary.

    Attributes:
      n: number of independent completions of a prompt, 1 to 128. The engine runs each separately.
      temperature: >= 0. Below 1e-5 the most likely token is taken.
      top_p: in (0, 1]. Keep the smallest set of tokens whose total probability reaches this.
      top_k: 0 or -1 for off, else >= 1. Keep this many of the most likely tokens.
      min_p: in [0, 1]. Keep tokens whose probability is at least this fraction of the highest one.
      seed: int64, or None for a random one. Prompt, parameters and seed determine the completion,
        independently of other requests in the batch.
      max_tokens: >= 1, or None for the rest of the context.
      min_tokens: >= 0. End tokens and stop token IDs are not sampled before this many tokens.
      stop: stop strings, which end the completion.
      stop_token_ids: tokens that end the completion.
      ignore_eos: continue after the model's own end tokens.
      presence_penalty, frequency_penalty: in [-2, 2], over the generated tokens.
      repetition_penalty: > 0, over prompt and generated tokens; 1 is off.
      logprobs: return the log probability of each sampled token and of this many most likely ones;
        -1 for all tokens, None for off. `within_logprobs` checks the limit of the server.
      prompt_logprobs: the same for each token of the prompt but the first, or None for off.
      logit_bias: token ID -> value to add to its logit. Values are clipped to [-100, 100].
      allowed_token_ids: the only tokens to sample, or None for all. Cannot be combined with a
        grammar.
      bad_words_token_ids: token sequences that the completion must not contain: the last token of a
        sequence is never sampled after the others.
      grammar: a constraint on the text, or None. It decides where the completion may end, and has
        precedence over ``min_tokens`` and ``bad_words_token_ids``.
      extra_args: values of the parameters that stages of the sampler declare, by name; or None.
        `ipc.parameters.checked_arguments` checks them.
      pooling: None to generate. Otherwise generate nothing and return one vector for the prompt:
        the final hidden state of its last token ("last"), or the mean over its tokens ("mean").
      detokenize: convert tokens to text. If false, only token IDs are returned, and stop strings
        are not allowed.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: keep the stop string at the end of the text.

    Raises:
      InvalidRequestError: a field is out of range; ``param`` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    extra_args: dict[str, Any] | None = None
    pooling: Literal["last", "mean"] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _require_range("n", self.n, 1, MAX_N)
        self._check_sampling()
        self._check_lengths()
        self._check_penalties()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            ok = count is None or ALL_LOGPROBS <= count <= INT64[1]
            _require(ok, name, f"at least 0, or {ALL_LOGPROBS} for all tokens", count)
        self._check_tokens()
        self._check_stops()

    def _check_sampling(self) -> None:
        _require_range("temperature", self.temperature, 0, math.inf)
        _require(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1", self.top_p)
        ok = -1 <= self.top_k <= INT64[1]
        _require(ok, "top_k", f"-1 or 0 (off) or between 1 and {INT64[1]}", self.top_k)
        _require_range("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _require_range("seed", self.seed, *INT64)

    def _check_lengths(self) -> None:
        most, least = self.max_tokens, self.min_tokens
        if most is not None:
            _require(most >= 1, "max_tokens", "at least 1", most)
            _require(most <= INT64[1], "max_tokens", f"at most {INT64[1]}", most)
            _require(least <= most, "min_tokens", f"at most max_tokens ({most})", least)
        _require_range("min_tokens", least, 0, INT64[1])

    def _check_penalties(self) -> None:
        _require_range("presence_penalty", self.presence_penalty, -2, 2)
        _require_range("frequency_penalty", self.frequency_penalty, -2, 2)
        penalty = self.repetition_penalty
        ok = math.isfinite(penalty) and penalty > 0
        _require(ok, "repetition_penalty", "a finite number greater than 0", penalty)

    def _check_tokens(self) -> None:
        bias = self.logit_bias or {}
        _require_at_most("logit_bias", len(bias), MAX_LOGIT_BIAS, "token IDs")
        for value in bias.values():
            _require(math.isfinite(value), "logit_bias", "finite numbers", value)
        allowed = self.allowed_token_ids
        if allowed is not None:
            ok = 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS
            expected = f"1 to {MAX_ALLOWED_TOKEN_IDS} token IDs"
            _require(ok, "allowed_token_ids", expected, len(allowed))
            if self.grammar is not None:
                raise InvalidRequestError(
                    "allowed_token_ids cannot be combined with a grammar, which determines the "
                    "allowed tokens itself",
                    param="allowed_token_ids",
                )
        words = self.bad_words_token_ids
        _require_at_most("bad_words", len(words), MAX_BAD_WORDS, "words")
        for word in words:
            ok = 0 < len(word) <= MAX_BAD_WORD_TOKENS
            expected = f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
            _require(ok, "bad_words", expected, len(word))

    def _check_stops(self) -> None:
        _require_at_most("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        _require(all(self.stop), "stop", "strings that are not empty", "")
        ok = self.detokenize or not self.stop
        _require(ok, "stop", "empty if detokenize is false", list(self.stop))
        num_ids = len(self.stop_token_ids)
        _require_at_most("stop_token_ids", num_ids, MAX_STOP_TOKEN_IDS, "token IDs")

    @property
    def most_tokens(self) -> int | None:
        """The most tokens to generate; None for the rest of the context, 0 to pool."""
        return self.max_tokens if self.pooling is None else 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is on."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def normalised(self) -> SamplingParams:
        """Returns the same parameters in the form that the engine relies on.

        * A greedy request has temperature 0 and no filters: top_k 0, top_p 1, min_p 0.
        * Any other temperature is within `TEMPERATURES`, and repetition_penalty is within
          `REPETITION_PENALTIES`, so that logits stay finite in float32.
        * top_k is 0 if it is off.
        """
        low, high = REPETITION_PENALTIES
        penalty = min(max(self.repetition_penalty, low), high)
        filters = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if not self.is_greedy:
            low, high = TEMPERATURES
            temperature = min(max(self.temperature, low), high)
            filters = {"temperature": temperature, "top_k": max(self.top_k, 0)}
        return msgspec.structs.replace(self, repetition_penalty=penalty, **filters)

    def for_completion(self, seed: int, max_tokens: int) -> SamplingParams:
        """Returns the parameters of one completion. They share all collections with these ones.

        Nothing is checked again: that would take as long for each completion as for the request.
        """
        own = copy.copy(self)
        msgspec.structs.force_setattr(own, "seed", seed)
        msgspec.structs.force_setattr(own, "max_tokens", max_tokens)
        return own

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequestError unless all token IDs are in ``[0, vocab_size)``.

        ``vocab_size`` is the width of the logits. JAX silently wraps, clamps or drops an index
        outside of this range, so the front must refuse such IDs.
        """
        check_ids(self.stop_token_ids, vocab_size, param="stop_token_ids")
        check_ids(tuple(self.logit_bias or ()), vocab_size, param="logit_bias")
        check_ids(self.allowed_token_ids or (), vocab_size, param="allowed_token_ids")
        for word in self.bad_words_token_ids:
            check_ids(word, vocab_size, param="bad_words")

    def within_logprobs(self, max_logprobs: int, vocab_size: int) -> SamplingParams:
        """Returns a copy with the counts of log probabilities that `logprobs_within` returns.

        Raises:
          InvalidRequestError: a count is above ``max_logprobs``.
        """
        counts = {}
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                counts[name] = logprobs_within(count, max_logprobs, vocab_size, param=name)
        return msgspec.structs.replace(self, **counts) if counts else self


def logprobs_within(count: int, max_logprobs: int, vocab_size: int, *, param: str) -> int:
    """Returns a requested count of log probabilities in ``[0, vocab_size]``; -1 asks for all.

    Raises:
      InvalidRequestError: the count, for field ``param``, is not in ``[0, max_logprobs]``.
    """
    wanted = vocab_size if count == ALL_LOGPROBS else count
    expected = f"between 0 and {max_logprobs} (--max-logprobs of this server)"
    _require(0 <= wanted <= max_logprobs, param, expected, count)
    return min(wanted, vocab_size)


def check_ids(ids: list[int] | tuple[int, ...], vocab_size: int, *, param: str) -> None:
    """Raises InvalidRequestError for field ``param`` unless all IDs are in ``[0, vocab_size)``."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = ids[start : start + IDS_AT_ONCE]
        if min(part) >= 0 and max(part) < vocab_size:
            continue
        bad = [i for i in ids if not 0 <= i < vocab_size][:5]
        raise InvalidRequestError(
            f"{param}: token IDs {bad} are out of vocabulary; expected IDs from 0 to "
            f"{vocab_size - 1}",
            param=param,
        )


def _require(ok: bool, param: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} must be {expected}, got {got!r}", param=param)


def _require_at_most(param: str, count: int, most: int, unit: str) -> None:
    _require(count <= most, param, f"at most {most} {unit}", count)


def _require_range(param: str, value: float, low: float, high: float) -> None:
    # Comparisons with NaN are false, so NaN is refused too. Infinity is never allowed.
    ok = low <= value <= high and math.isfinite(value)
    expected = f"at least {low}" if high == math.inf else f"between {low} and {high}"
    _require(ok, param, expected, value)
