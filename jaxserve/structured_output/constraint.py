"""Compiles the grammars of requests in threads, and follows them token by token."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from jaxserve.core.plan import Constraint
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.grammar import MAX_SPACES, first_error, is_json, make_matcher
from jaxserve.structured_output.vocabulary import TokenSource, Vocabulary

logger = logging.getLogger(__name__)

NUM_THREADS = 2
NUM_CACHED = 64
"""Number of compiled grammars in the cache."""

TOKEN_TIME_S = 0.05
"""Time that a token of a grammar may take. All requests of a step wait for it."""

MAX_EXTRA_TIME_S = 1.0
"""A request ends when its tokens have taken more than this in total. Only the time over
`TOKEN_TIME_S` of each token counts. The first tokens take the longest, because llguidance caches
states of a grammar."""

ALL = 0xFFFFFFFF
"""A word of a mask that allows 32 tokens."""

COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")
"""Stop reasons of a matcher whose text is complete. Other reasons are limits of llguidance."""


class GrammarCompiler:
    """Makes the constraints of requests in its own threads.

    Args:
      tokenizer: the tokenizer of the model. Its tokens are read for the first grammar.
      vocab_size: width of the logits.
    """

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    def start(self, submit: Submit) -> Future[Constraint]:
        """Starts to compile the grammar of a request.

        The future raises InvalidRequestError if the grammar is invalid.
        """
        return self._threads.submit(self._make, submit)

    def _make(self, submit: Submit) -> Constraint:
        """Returns a constraint with a copy of the compiled grammar, which may be in the cache."""
        grammar = submit.params.grammar
        assert grammar is not None
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = make_matcher(grammar, self._vocabulary)
            if matcher.is_error():
                raise InvalidRequestError(first_error(matcher))
            with self._lock:
                self._compiled[grammar] = matcher
                if len(self._compiled) > NUM_CACHED:
                    self._compiled.popitem(last=False)
        constraint = GrammarConstraint(
            matcher.deep_copy(),
            self._vocabulary,
            end_ids=_end_ids(submit, self._vocabulary),
            max_spaces=MAX_SPACES if is_json(grammar) else None,
        )
        # Output of an engine that died is part of the completion.
        prompt = submit.prompt_token_ids
        for token_id in prompt[len(prompt) - submit.num_prior_tokens :]:
            constraint.accept(token_id)
        return constraint


class GrammarConstraint:
    """Follows one completion with a matcher of its grammar. Implements `Constraint`.

    Args:
      matcher: a matcher in its initial state, which this constraint may change.
      vocabulary: the vocabulary that the matcher was made for.
      end_ids: tokens that may end the completion wherever the grammar allows an end.
      max_spaces: maximum number of successive whitespace bytes; None: no limit.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        *,
        end_ids: frozenset[int],
        max_spaces: int | None,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._max_spaces = max_spaces
        self._num_spaces = 0
        self._error: str | None = None
        self._extra_time_s = 0.0

    @property
    def error(self) -> str | None:
        """See `Constraint.error`."""
        return self._error

    def fill_mask(self, mask: np.ndarray) -> None:
        """See `Constraint.fill_mask`."""
        if self._error is None:
            head = mask[: self._vocabulary.num_words]
            mask[len(head) :] = 0
            with self._timed():
                self._fill(head)
            if not mask.any():
                self._fail(first_error(self._matcher, has_text=True) or "no token can follow")
        if self._error is not None:
            mask.fill(ALL)

    def accept(self, token_id: int) -> FinishReason | None:
        """See `Constraint.accept`."""
        if self._error is not None:
            return FinishReason.ERROR
        if token_id in self._end_ids and self._matcher.is_accepting():
            return FinishReason.STOP
        with self._timed():
            is_taken = self._matcher.consume_token(token_id)
        if not is_taken:
            self._fail(f"token {token_id}: {first_error(self._matcher, has_text=True)}")
        if self._error is not None:
            return FinishReason.ERROR
        if self._matcher.is_stopped():
            if not self._matcher.is_error() and self._matcher.stop_reason() in COMPLETE:
                return FinishReason.STOP
            self._fail(first_error(self._matcher, has_text=True) or self._matcher.stop_reason())
            return FinishReason.ERROR
        length = self._vocabulary.space_lengths.get(token_id)
        self._num_spaces = 0 if length is None else self._num_spaces + length
        return None

    def _fill(self, mask: np.ndarray) -> None:
        """Writes the tokens that may come next into mask u32[num_words]: none after an error."""
        self._vocabulary.fill(self._matcher, mask)
        if self._matcher.is_error():
            mask.fill(0)
            return
        if self._max_spaces is not None and self._num_spaces >= self._max_spaces:
            other = mask & ~self._vocabulary.space_mask
            if other.any():
                mask[:] = other
        eos = self._vocabulary.eos_token_id
        if eos not in self._end_ids:
            # If no other token is left, the text is complete and only this token can end it.
            _clear(mask, eos)
            if not mask.any():
                _set(mask, eos)
        if self._matcher.is_accepting():
            for token_id in self._end_ids:
                _set(mask, token_id)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Measures processor time; fails the constraint once its tokens have taken too much."""
        start = time.thread_time()
        yield
        self._extra_time_s += max(time.thread_time() - start - TOKEN_TIME_S, 0)
        if self._extra_time_s > MAX_EXTRA_TIME_S:
            self._fail(f"its tokens exceeded their time by {self._extra_time_s:.1f} s in total")

    def _fail(self, why: str) -> None:
        self._error = f"the completion can no longer follow its grammar: {why}"
        logger.error("%s", self._error)


def _end_ids(submit: Submit, vocabulary: Vocabulary) -> frozenset[int]:
    """Returns the end tokens of a request: its EOS, and its stop tokens that are special tokens.

    The grammar alone decides about stop tokens that are text.
    """
    stop_ids = submit.params.stop_token_ids
    ids = {i for i in stop_ids if i in vocabulary.special_ids}
    if submit.eos_token_id is not None and submit.eos_token_id < len(vocabulary.tokens):
        ids.add(submit.eos_token_id)
    return frozenset(ids)


def _set(mask: np.ndarray, token_id: int) -> None:
    mask[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: np.ndarray, token_id: int) -> None:
    mask[token_id // 32] &= np.uint32(ALL ^ 1 << token_id % 32)
