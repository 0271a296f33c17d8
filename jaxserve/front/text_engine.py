"""The front of an engine: text in, text out, and the door at which every request is checked."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from jaxserve import __version__
from jaxserve.client.protocol import Engine
from jaxserve.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnknownModelError,
)
from jaxserve.front.admission import AdmissionLimit, Permit
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.front.metrics import RequestMetrics
from jaxserve.front.outputs import Answer, Delta, merge, stream_answer
from jaxserve.front.requests import AnswerBuilder
from jaxserve.parsing.message_parser import MessageParser
from jaxserve.parsing.registry import (
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.checks import GrammarChecks
from jaxserve.text.tokenizer import Tokenizer

INLINE_CHARS = 400
"""Texts up to this long are encoded at once: a hop to a thread costs more than the work."""


class TextEngine:
    """Checks requests, runs them on an engine and turns tokens into text.

    Args:
      engine: where requests run.
      tokenizer: of the model that the engine runs.
      model_names: the names under which the model is served. Replies carry the one that was asked
        for, or the first one.
      defaults: what counts where a request leaves something unset.
      max_in_flight: answers in flight at the same time, each of ``n`` and of a batch counting; more
        are turned away with QueueFullError. A request for more than this is never served.
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
        max_in_flight: int = 1024,
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
        self.admission = AdmissionLimit(max_in_flight)
        self.chat_template = chat_template or tokenizer.chat_template
        self.template_variables = dict(template_variables or {})
        self.tool_call_parser, self.reasoning_parser = _parsers(
            self.chat_template or "", tool_call_parser, reasoning_parser
        )
        self.vocab_size = ready.vocab_size
        self._builder = AnswerBuilder(ready, tokenizer, self.defaults)
        self.max_model_len = self._builder.max_model_len
        self.fingerprint = _fingerprint(self.model_names[0], self.vocab_size, self.max_model_len)
        self.metrics = RequestMetrics(self.max_model_len)
        self.grammars = GrammarChecks(tokenizer, self.vocab_size)
        self._running: dict[str, str] = {}  # ids of answers -> ids of their requests

    @property
    def num_in_flight(self) -> int:
        """Answers accepted and not at their end."""
        return self.admission.num_taken

    @property
    def model_name(self) -> str:
        """The name that replies carry if none was asked for."""
        return self.model_names[0]

    @functools.cached_property
    def hides_think_tags(self) -> bool:
        """Whether the tags of think blocks are special tokens, which texts do not show."""
        names = set(map(self.tokenizer.token_text, self.tokenizer.special_ids))
        return not names.isdisjoint(("<think>", "</think>"))

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless ``name`` is served here; None and "" mean any model."""
        if name and name not in self.model_names:
            raise UnknownModelError(name, self.model_names)

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
          QueueFullError: too many answers are in flight.
        """
        num_answers = len(prompts) * params.n
        if num_answers > self.admission.limit:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n={params.n} ask for {num_answers} answers; this "
                f"server takes at most {self.admission.limit} at a time",
                param=param,
            )
        answers = self._builder.build(
            prompts,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            default_max_tokens=default_max_tokens,
            param=param,
            length_param=length_param,
            parsers=parsers,
        )
        return self._run(answers, request_id, self.admission.take(num_answers))

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

    async def _run(
        self, answers: list[Answer], owner: str, places: Permit
    ) -> AsyncGenerator[Delta, None]:
        self._running |= {answer.request_id: owner for answer in answers}
        streams = [stream_answer(a, self.engine, self.tokenizer, self.metrics) for a in answers]
        try:
            async with aclosing(merge(streams)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            places.release()
            for answer in answers:
                del self._running[answer.request_id]
            longest = max(answer.record.num_generated for answer in answers)
            self.metrics.max_generation_tokens.observe(longest)

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
