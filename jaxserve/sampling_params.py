"""How the tokens of one request are chosen and when it ends, validated once at the door."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from jaxserve.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this takes the most likely token."""

TEMPERATURES = (0.01, 1e6)
REPETITION_PENALTIES = (1e-6, 1e6)
"""The ranges that an engine computes with. Values beyond them would make float32 logits infinite or
NaN, so `SamplingParams.normalised` moves them to the limits.
"""

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
ALL_LOGPROBS = -1
"""Log probabilities of the whole vocabulary."""
MAX_LOGIT_BIAS = 2**18
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_CHARS = 2**18
BIAS_LIMIT = 100.0
"""A bias beyond this acts like this, as with the OpenAI API."""
INT64 = (-(2**63), 2**63 - 1)


class Grammar(msgspec.Struct, frozen=True):
    """Constrains the content of a completion.

    Attributes:
      kind: the meaning of ``spec``.
      spec: a JSON schema as JSON text; a regular expression; a JSON array of strings, one of which
        is the content; a grammar in Lark syntax or EBNF; for "json_object" nothing.
      structural_tag: a grammar in Lark syntax for the whole completion, in which ``@content``
        stands for ``kind`` and ``spec``, or empty; see `structured_output.structural_tag`.

    Raises:
      InvalidRequestError: ``spec`` is longer than `MAX_GRAMMAR_CHARS`.
        `structured_output.grammar.check_grammar` checks the rest.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    spec: str = ""
    structural_tag: str = ""

    def __post_init__(self) -> None:
        _require(
            len(self.spec) <= MAX_GRAMMAR_CHARS,
            "grammar",
            f"at most {MAX_GRAMMAR_CHARS} characters",
            len(self.spec),
        )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with the names and defaults of the OpenAI API and of vLLM.

    Construction validates every field that can be judged without the model; ids are checked
    against the vocabulary by `check_token_ids`.

    Attributes:
      n: number of independent answers, 1 to 128. The engine runs each one as a request of its own.
      temperature: >= 0. Below 1e-5 the most likely token is taken.
      top_p: in (0, 1]. Keep the smallest set of tokens whose probability reaches this.
      top_k: 0 or -1 for off, else >= 1. Keep this many of the most likely tokens.
      min_p: in [0, 1]. Keep tokens at least this likely relative to the most likely one.
      seed: int64, or None to draw one. The answer is a function of prompt, parameters and seed,
        whatever else is in the batch.
      max_tokens: >= 1, or None for the rest of the context.
      min_tokens: >= 0. End tokens and stop ids are not sampled before this many tokens.
      stop: texts that end the answer.
      stop_token_ids: tokens that end the answer.
      ignore_eos: go on after the model's own end tokens.
      presence_penalty, frequency_penalty: in [-2, 2], over the generated tokens.
      repetition_penalty: > 0, over prompt and generated tokens; 1 is off.
      logprobs: return the log probability of each sampled token and of this many of the most
        likely ones, -1 for all; or None for off. How many there may be is for the engine to say.
      prompt_logprobs: the same for each token of the prompt but the first, or None for off.
      logit_bias: token ids to what is added to their logits; values beyond +-100 act like +-100.
      allowed_token_ids: the only tokens to sample, or None for all. Cannot be combined with a
        grammar.
      bad_words_token_ids: token sequences that must not come up in the answer: the last token of
        one is not sampled after the others.
      grammar: what the text must look like, or None. It decides where the answer may end, and
        comes before ``min_tokens`` and ``bad_words_token_ids``.
      pooling: generate nothing, but return one vector for the prompt: the final hidden state of its
        last token, or the mean over all its tokens. None to generate.
      detokenize: make text of the answer; without it there are token ids only, and no stop strings.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: keep the stop string that ended the answer.

    Raises:
      InvalidRequestError: a field is out of its range; ``param`` names it.
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
    pooling: Literal["last", "mean"] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _require_range("n", self.n, 1, MAX_N)
        _require_range("temperature", self.temperature, 0, math.inf)
        _require(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1", self.top_p)
        _require(
            -1 <= self.top_k <= INT64[1],
            "top_k",
            f"-1 or 0 (off) or between 1 and {INT64[1]}",
            self.top_k,
        )
        _require_range("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _require_range("seed", self.seed, *INT64)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
            _require(
                self.max_tokens <= INT64[1], "max_tokens", f"at most {INT64[1]}", self.max_tokens
            )
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"at most max_tokens ({self.max_tokens})",
                self.min_tokens,
            )
        _require(
            0 <= self.min_tokens <= INT64[1],
            "min_tokens",
            f"between 0 and {INT64[1]}",
            self.min_tokens,
        )
        _require_range("presence_penalty", self.presence_penalty, -2, 2)
        _require_range("frequency_penalty", self.frequency_penalty, -2, 2)
        finite = math.isfinite(self.repetition_penalty)
        _require(
            finite and self.repetition_penalty > 0,
            "repetition_penalty",
            "a finite number greater than 0",
            self.repetition_penalty,
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(
                count is None or ALL_LOGPROBS <= count <= INT64[1],
                name,
                f"at least 0, or {ALL_LOGPROBS} for all tokens",
                count,
            )
        self._check_tokens()
        _require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"at most {MAX_STOP_STRINGS} texts",
            len(self.stop),
        )
        _require(all(self.stop), "stop", "texts that are not empty", "")
        has_text = self.detokenize or not self.stop
        _require(has_text, "stop", "empty where detokenize is false", list(self.stop))
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids",
            len(self.stop_token_ids),
        )

    def _check_tokens(self) -> None:
        """Sizes and values of the fields that name tokens."""
        bias = self.logit_bias or {}
        _require(
            len(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} ids", len(bias)
        )
        for value in bias.values():
            _require(math.isfinite(value), "logit_bias", "finite numbers", value)
        allowed = self.allowed_token_ids
        if allowed is not None:
            _require(
                0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS,
                "allowed_token_ids",
                f"1 to {MAX_ALLOWED_TOKEN_IDS} ids",
                len(allowed),
            )
            if self.grammar is not None:
                raise InvalidRequestError(
                    "allowed_token_ids cannot be combined with a grammar, which says itself what "
                    "is allowed",
                    param="allowed_token_ids",
                )
        words = self.bad_words_token_ids
        _require(
            len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words", len(words)
        )
        for word in words:
            _require(
                0 < len(word) <= MAX_BAD_WORD_TOKENS,
                "bad_words",
                f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens",
                len(word),
            )

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be; None: as long as there is room, 0: there is none."""
        return self.max_tokens if self.pooling is None else 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
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

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if an id is not in ``[0, vocab_size)``.

        ``vocab_size`` is the width of the logits. In jax an id outside it wraps, clamps or is
        dropped in silence, so it must not get past the front.
        """
        check_ids(self.stop_token_ids, vocab_size, param="stop_token_ids")
        check_ids(tuple(self.logit_bias or ()), vocab_size, param="logit_bias")
        check_ids(self.allowed_token_ids or (), vocab_size, param="allowed_token_ids")
        for word in self.bad_words_token_ids:
            check_ids(word, vocab_size, param="bad_words")

    def within_logprobs(self, max_logprobs: int, vocab_size: int) -> SamplingParams:
        """The same, with counts of log probabilities that are in ``[0, vocab_size]``.

        Raises:
          InvalidRequestError: more than ``max_logprobs`` are asked for.
        """
        counts = {}
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                counts[name] = logprobs_within(count, max_logprobs, vocab_size, param=name)
        return msgspec.structs.replace(self, **counts) if counts else self


def logprobs_within(count: int, max_logprobs: int, vocab_size: int, *, param: str) -> int:
    """The number of log probabilities that is meant, in ``[0, vocab_size]``.

    Raises InvalidRequestError, naming ``param``, if it is not one in ``[0, max_logprobs]``.
    """
    wanted = vocab_size if count == ALL_LOGPROBS else count
    expected = f"between 0 and {max_logprobs} (--max-logprobs of this server)"
    _require(0 <= wanted <= max_logprobs, param, expected, count)
    return min(wanted, vocab_size)


def check_ids(ids: list[int] | tuple[int, ...], vocab_size: int, *, param: str) -> None:
    """Raises InvalidRequestError, naming ``param``, if an id is not in ``[0, vocab_size)``."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = [i for i in ids if not 0 <= i < vocab_size][:5]
        raise InvalidRequestError(
            f"{param}: token ids {bad} are out of vocabulary; expected ids from 0 to "
            f"{vocab_size - 1}",
            param=param,
        )


def _require(ok: bool, param: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} must be {expected}, got {got!r}", param=param)


def _require_range(param: str, value: float, low: float, high: float) -> None:
    # A comparison with NaN is false, so NaN is refused here too. Infinity is never a number.
    ok = low <= value <= high and math.isfinite(value)
    expected = f"at least {low}" if high == math.inf else f"between {low} and {high}"
    _require(ok, param, expected, value)
