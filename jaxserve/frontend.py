"""The front of an engine: text in, text out, and the door at which every request is checked."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve import __version__
from jaxserve.core.limits import check_length, context_length
from jaxserve.engine_protocol import Engine
from jaxserve.errors import (
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
    UnknownModelError,
)
from jaxserve.generation_defaults import GenerationDefaults
from jaxserve.grammar_checks import GrammarChecks
from jaxserve.metrics import RequestMetrics, RequestRecord
from jaxserve.parsing.message_parser import MessageParser
from jaxserve.parsing.registry import (
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)
from jaxserve.sampling_params import INT64, MIN_TEMPERATURE, SamplingParams, check_ids
from jaxserve.streams import Answer, Delta, merge, stream_answer
from jaxserve.tokenizer import Tokenizer

INLINE_CHARS = 400
"""Texts up to this long are encoded at once: a hop to a thread costs more than the work."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a front end takes on.

    Attributes:
      max_in_flight: answers under way at the same time, each of ``n`` and of a batch counting; more
        are turned away with QueueFullError. A request for more than this is never served.
    """

    max_in_flight: int = 1024


class Frontend:
    """Checks requests, runs them on an engine and turns tokens into text.

    Args:
      engine: where requests run.
      tokenizer: of the model that the engine runs.
      model_names: the names under which the model is served; replies carry the first one.
      defaults: what counts where a request leaves something unset.
      limits: how much to take on.
      chat_template: jinja source, instead of the tokenizer's own.
      template_variables: for the template, where a request does not set them.
      tool_call_parser: the format in which the model writes calls, a key of
        `parsing.registry.TOOL_PARSERS`; "auto": what the chat template shows; "none": no format.
      reasoning_parser: likewise the kind of its think blocks, of `REASONING_PARSERS`.

    Raises:
      ConfigError: there is no parser of such a name.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        model_names: Sequence[str],
        defaults: GenerationDefaults | None = None,
        limits: Limits | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        ready = engine.ready
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_names = tuple(model_names)
        self.defaults = defaults or GenerationDefaults()
        self.limits = limits or Limits()
        self.chat_template = chat_template or tokenizer.chat_template
        self.template_variables = dict(template_variables or {})
        self.tool_call_parser, self.reasoning_parser = _parsers(
            self.chat_template or "", tool_call_parser, reasoning_parser
        )
        self.vocab_size = ready.vocab_size
        self.max_model_len = context_length(
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
        )
        self.fingerprint = _fingerprint(self.model_names[0], self.vocab_size, self.max_model_len)
        self.metrics = RequestMetrics(self.max_model_len)
        self.grammars = GrammarChecks(tokenizer)
        self.num_in_flight = 0
        self._running: dict[str, str] = {}  # ids of answers -> ids of their requests
        more = {i for i in self.defaults.eos_token_ids if i != tokenizer.eos_token_id}
        self._more_end_tokens = tuple(sorted(more))
        check_ids(self._more_end_tokens, self.vocab_size, param="eos_token_id")

    @property
    def model_name(self) -> str:
        """The name that replies carry."""
        return self.model_names[0]

    @functools.cached_property
    def hides_think_tags(self) -> bool:
        """Whether the tags of think blocks are special tokens, which texts do not show."""
        names = set(map(self.tokenizer.token_text, self.tokenizer.special_ids))
        return not names.isdisjoint(("<think>", "</think>"))

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless ``name`` is served here; None and "" mean any model."""
        if name and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise UnknownModelError(
                f"The model `{name[:200]}` does not exist. Models served here: {served}"
            )

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """`encode_batch` for one text."""
        (ids,) = await self.encode_batch([text], add_special_tokens=add_special_tokens, param=param)
        return ids

    async def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        any_length: bool = False,
    ) -> list[list[int]]:
        """The token ids of texts. Long work is done in a thread.

        Raises:
          ContextLengthError: a text is longer than any text that fits the context, and not
            ``any_length`` will do.
        """

        def encode_all() -> list[list[int]]:
            for text in () if any_length else texts:
                self._check_chars(text, param)
            return [
                self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]

        is_short = sum(map(len, texts)) <= INLINE_CHARS
        return encode_all() if is_short else await asyncio.to_thread(encode_all)

    def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, request_id: str = ""
    ) -> AsyncGenerator[Delta, None]:
        """`generate_batch` for one prompt."""
        return self.generate_batch([prompt_ids], params, request_id=request_id)

    def generate_batch(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        default_max_tokens: int | None = None,
        param: str = "prompt",
        length_param: str = "max_tokens",
        parsers: Sequence[MessageParser] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Checks everything at once, and returns the deltas of all answers as they come.

        Answer ``j`` to prompt ``i`` has the index ``i * params.n + j``, and the seed ``params.seed
        + j`` if there is one. Nothing runs before the first delta is asked for. Close the generator
        (best by `contextlib.aclosing`) to abort what is still running.

        Args:
          prompts: token ids, none empty.
          params: of every answer. ``max_tokens`` None: the default, or what the context leaves.
          request_id: appears in the ids that the engine sees; need not be unique.
          priority: smaller goes first, under the priority policy.
          cache_salt: only requests with the same one share what is cached of their prompts.
          default_max_tokens: length of an answer if none is asked for, as far as it fits.
          param: the field to name when a prompt is at fault.
          length_param: the field to name when the length that was asked for is at fault.
          parsers: one for each answer, if answers are to be parsed.

        Raises:
          ContextLengthError, InvalidRequestError: the request cannot be served.
          QueueFullError: too many answers are under way.
        """
        params.check_token_ids(self.vocab_size)
        if not INT64[0] <= priority <= INT64[1]:
            raise InvalidRequestError(
                f"priority must be between {INT64[0]} and {INT64[1]}, got {priority}",
                param="priority",
            )
        num_answers = len(prompts) * params.n
        if num_answers > self.limits.max_in_flight:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n={params.n} ask for {num_answers} answers; this "
                f"server takes at most {self.limits.max_in_flight} at a time",
                param=param,
            )
        if default_max_tokens is None:
            default_max_tokens = self.defaults.max_tokens
        base = f"{request_id}-{uuid.uuid4().hex[:12]}"
        answers: list[Answer] = []
        for prompt_ids in prompts:
            self._check_prompt(prompt_ids, params.max_tokens, param, length_param)
            room = self.max_model_len - len(prompt_ids)
            unasked = room if default_max_tokens is None else min(default_max_tokens, room)
            max_tokens = unasked if params.max_tokens is None else params.max_tokens
            for sample in range(params.n):
                index = len(answers)
                answers.append(
                    Answer(
                        index=index,
                        request_id=f"{base}-{index}",
                        prompt_ids=prompt_ids,
                        params=self._answer_params(params, sample, max_tokens),
                        eos_token_id=None if params.ignore_eos else self.tokenizer.eos_token_id,
                        priority=priority,
                        cache_salt=cache_salt,
                        record=RequestRecord(
                            time.monotonic(), len(prompt_ids), max_tokens, params.n
                        ),
                        parser=parsers[index] if parsers else None,
                    )
                )
        if self.num_in_flight + num_answers > self.limits.max_in_flight:
            raise QueueFullError(
                f"{self.num_in_flight} requests are under way and the server takes at most "
                f"{self.limits.max_in_flight}; try again later"
            )
        return self._run(answers, request_id)

    def abort(self, request_id: str | None) -> int:
        """Ends the answers to requests of this id, or with None all. Returns how many there were.

        Their last delta has the finish reason "abort".
        """
        ids = [
            answer_id
            for answer_id, owner in self._running.items()
            if request_id is None or owner == request_id
        ]
        self.engine.abort(ids)
        return len(ids)

    async def _run(self, answers: list[Answer], owner: str) -> AsyncGenerator[Delta, None]:
        self.num_in_flight += len(answers)
        self._running |= {answer.request_id: owner for answer in answers}
        streams = [stream_answer(a, self.engine, self.tokenizer, self.metrics) for a in answers]
        try:
            async with aclosing(merge(streams)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.num_in_flight -= len(answers)
            for answer in answers:
                del self._running[answer.request_id]
            longest = max(answer.record.num_generated for answer in answers)
            self.metrics.max_generation_tokens.observe(longest)

    def _check_prompt(
        self, prompt_ids: list[int], max_tokens: int | None, param: str, length_param: str
    ) -> None:
        """Raises if a prompt is not one to run."""
        ready = self.engine.ready
        try:
            check_length(
                len(prompt_ids),
                max_tokens,
                max_model_len=ready.max_model_len,
                num_blocks=ready.num_blocks,
                block_size=ready.block_size,
            )
        except InvalidRequestError as error:
            field = param if error.param == "prompt" else length_param
            raise type(error)(error.message, param=field) from error
        check_ids(prompt_ids, self.vocab_size, param=param)

    def _answer_params(
        self, params: SamplingParams, sample: int, max_tokens: int
    ) -> SamplingParams:
        """The parameters of one answer, as the engine expects them."""
        temperature = params.temperature
        greedy = params.is_greedy
        if not greedy and temperature < MIN_TEMPERATURE:
            temperature = MIN_TEMPERATURE
        seed = random.getrandbits(63) if params.seed is None else params.seed + sample
        stop_ids = params.stop_token_ids
        if self._more_end_tokens and not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys(stop_ids + self._more_end_tokens))
        return msgspec.structs.replace(
            params,
            n=1,
            temperature=temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=0 if greedy or params.top_k < 0 else params.top_k,
            min_p=0.0 if greedy else params.min_p,
            seed=(seed + 2**63) % 2**64 - 2**63,
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
        )

    def _check_chars(self, text: str, param: str) -> None:
        """Refuses a text that is too long in any case, which spares encoding it."""
        if len(text) <= self.max_model_len:
            return
        at_least = -(-len(text) // self._longest_token)
        if at_least > self.max_model_len:
            raise ContextLengthError(
                f"the maximum context length is {self.max_model_len} tokens, but the prompt has "
                f"{len(text)} characters, which are at least {at_least} tokens",
                param=param,
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, at least 1."""
        return max(1, *map(len, map(self.tokenizer.token_bytes, range(self.tokenizer.vocab_size))))


def _parsers(template: str, calls: str, reasoning: str) -> tuple[str | None, str | None]:
    """The names of the parsers to use. Raises ConfigError if there is no such parser."""
    if calls == "auto":
        calls = detect_tool_parser(template) or "none"
    if reasoning == "auto":
        reasoning = detect_reasoning_parser(template) or "none"
    if calls != "none":
        tool_parser(calls)
    if reasoning != "none":
        reasoning_parser(reasoning)
    return (None if calls == "none" else calls), (None if reasoning == "none" else reasoning)


def _fingerprint(*facts: object) -> str:
    """Names what answers; changes with the software and the model."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()
    return f"jaxserve-{__version__}-{digest}"
