"""The sampling parameters of a request. Construction converts and validates them."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from jaxserve.conversion import types_of
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params.fields import (
    ALL_LOGPROBS,
    FORMS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    as_field,
    range_words,
    require,
    require_at_most,
)
from jaxserve.sampling_params.fields import BIAS_LIMIT as BIAS_LIMIT
from jaxserve.sampling_params.fields import IDS_AT_ONCE as IDS_AT_ONCE
from jaxserve.sampling_params.fields import INT64 as INT64
from jaxserve.sampling_params.fields import MAX_N as MAX_N
from jaxserve.sampling_params.grammar import MAX_GRAMMAR_CHARS as MAX_GRAMMAR_CHARS
from jaxserve.sampling_params.grammar import Grammar as Grammar

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this takes the most likely token."""

TEMPERATURES = (0.01, 1e6)
REPETITION_PENALTIES = (1e-6, 1e6)
"""The ranges that an engine computes with. Values outside them would make float32 logits infinite
or NaN, so `SamplingParams.normalised` clips them.
"""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with the names and defaults of the OpenAI API and of vLLM.

    Construction validates all fields as far as possible without the model; `check_token_ids` checks
    token IDs against the vocabulary. It also converts values that mean the same: any sequence to a
    tuple, a string in ``stop`` to a tuple with this string, None to an empty tuple where None is
    not a value, decimal strings in the keys of ``logit_bias`` to integers, integers and reals of
    NumPy to those of Python, integers to floats. Booleans are no numbers, and 1.0 is no integer.

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
      InvalidRequestError: a field is out of range or has the wrong type; ``param`` names it.
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
        # Decoders produce values of exactly these types, so requests of servers skip the rest.
        values = msgspec.structs.astuple(self)
        is_plain = all(map(operator.contains, _TYPES, map(type, values)))
        if not is_plain or not self._has_plain_items():
            self._convert(values)
            values = msgspec.structs.astuple(self)
        for name, low, high, place in _NUMBERS:
            value = values[place]
            if value is not None and not low <= value <= high:
                require(False, name, range_words(name, value), value)
        least, most = self.min_tokens, self.max_tokens
        if most is not None and least > most:
            require(False, "min_tokens", f"at most max_tokens ({most})", least)
        ok = self.pooling in (None, "last", "mean")
        require(ok, "pooling", FORMS["pooling"], self.pooling)
        self._check_tokens()
        self._check_stops()

    def _has_plain_items(self) -> bool:
        """Whether the items of all collections have the types that they are declared with."""
        return (
            _are(self.stop, str)
            and _are(self.stop_token_ids, int)
            and _are(self.allowed_token_ids, int)
            and _are(self.bad_words_token_ids, tuple)
            and all(_are(word, int) for word in self.bad_words_token_ids)
            and _are(self.logit_bias, int)
            and (self.logit_bias is None or _are(self.logit_bias.values(), float))
            and _are(self.extra_args, str)
        )

    def _convert(self, values: tuple[Any, ...]) -> None:
        """Converts each value to the type of its field. Raises InvalidRequestError."""
        for field, expected, value in zip(_FIELDS, _TYPES, values, strict=True):
            if type(value) not in expected or isinstance(value, tuple | dict):
                converted = as_field(field.name, value, field.type)
                msgspec.structs.force_setattr(self, field.name, converted)

    def _check_tokens(self) -> None:
        bias = self.logit_bias
        if bias:
            require_at_most("logit_bias", len(bias), MAX_LOGIT_BIAS, "token IDs")
            if not all(map(math.isfinite, bias.values())):
                bad = next(value for value in bias.values() if not math.isfinite(value))
                require(False, "logit_bias", "finite numbers", bad)
        allowed = self.allowed_token_ids
        if allowed is not None:
            ok = 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS
            expected = f"1 to {MAX_ALLOWED_TOKEN_IDS} token IDs"
            require(ok, "allowed_token_ids", expected, len(allowed))
            if self.grammar is not None:
                raise InvalidRequestError(
                    "allowed_token_ids cannot be combined with a grammar, which determines the "
                    "allowed tokens itself",
                    param="allowed_token_ids",
                )
        words = self.bad_words_token_ids
        if words:
            require_at_most("bad_words", len(words), MAX_BAD_WORDS, "words")
        for word in words:
            ok = 0 < len(word) <= MAX_BAD_WORD_TOKENS
            expected = f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
            require(ok, "bad_words", expected, len(word))

    def _check_stops(self) -> None:
        if self.stop:
            require_at_most("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
            require(all(self.stop), "stop", "strings that are not empty", "")
            require(self.detokenize, "stop", "empty if detokenize is false", list(self.stop))

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
        return self.with_valid(repetition_penalty=penalty, **filters)

    def with_valid(self, **values: Any) -> SamplingParams:
        """Returns a copy with other values, which must be valid: unlike by construction and by
        ``msgspec.structs.replace``, nothing is checked again.
        """
        changed = copy.copy(self)
        for name, value in values.items():
            msgspec.structs.force_setattr(changed, name, value)
        return changed

    def for_completion(self, seed: int, max_tokens: int) -> SamplingParams:
        """Returns the parameters of one completion. They share all collections with these ones.

        Nothing is checked again: that would take as long for each completion as for the request.
        """
        return self.with_valid(seed=seed, max_tokens=max_tokens)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequestError unless all token IDs are in ``[0, vocab_size)``.

        ``vocab_size`` is the width of the logits. JAX silently wraps, clamps or drops an index
        outside of this range, so the front must refuse such IDs. The front adds the end tokens of
        the model to ``stop_token_ids`` later, so the limit on these is checked here as well.
        """
        num_ids = len(self.stop_token_ids)
        require_at_most("stop_token_ids", num_ids, MAX_STOP_TOKEN_IDS, "token IDs")
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
        return self.with_valid(**counts) if counts else self


def logprobs_within(count: int, max_logprobs: int, vocab_size: int, *, param: str) -> int:
    """Returns a requested count of log probabilities in ``[0, vocab_size]``; -1 asks for all.

    Raises:
      InvalidRequestError: the count, for field ``param``, is not in ``[0, max_logprobs]``.
    """
    wanted = vocab_size if count == ALL_LOGPROBS else count
    expected = f"between 0 and {max_logprobs} (--max-logprobs of this server)"
    require(0 <= wanted <= max_logprobs, param, expected, count)
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


# Computed once, since every request is checked several times: the types of the fields, and the
# name, least value, most value and place of each number.
_FIELDS = msgspec.structs.fields(SamplingParams)
_TYPES = tuple(types_of(field.type) for field in _FIELDS)
_NUMBERS = tuple(
    (field.name, RANGES[field.name].low, RANGES[field.name].high, place)
    for place, field in enumerate(_FIELDS)
    if field.name in RANGES
)


def _are(items: Collection[Any] | None, kind: type) -> bool:
    """Whether all items are of exactly this type. True if there are none."""
    return not items or set(map(type, items)) == {kind}
