"""Runs requests for text on an engine: encodes prompts, admits requests and streams completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxserve.client.protocol import Engine
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.front.admission import AdmissionLimit, Permit
from jaxserve.front.concurrency import merge
from jaxserve.front.metrics import RequestMetrics
from jaxserve.front.outputs import Delta, stream_completion
from jaxserve.front.requests import CompletionTask, GenerateRequest, resolve
from jaxserve.front.served_model import ServedModel
from jaxserve.structured_output.checks import GrammarChecks

INLINE_CHARS = 400
"""Strings of at most this length in total are encoded and rendered on the event loop: handing them
to a thread would take longer."""


class TextEngine:
    """Runs requests of one model on one engine, or on a client of several.

    Args:
      engine: runs token IDs.
      model: the facts about the model that the engine runs.
      max_in_flight: the most completions in flight; each of ``n`` counts, for each prompt. Requests
        over this limit are refused.

    Attributes:
      engine: as above.
      model: as above.
      admission: counts the completions in flight.
      metrics: counts and times of requests.
      grammars: checks the grammars of requests.
    """

    def __init__(self, engine: Engine, model: ServedModel, *, max_in_flight: int = 1024) -> None:
        self.engine = engine
        self.model = model
        self.admission = AdmissionLimit(max_in_flight)
        self.metrics = RequestMetrics(model.max_model_len)
        self.grammars = GrammarChecks(model.tokenizer, model.vocab_size)
        self._running: dict[str, str] = {}  # IDs of completions -> IDs of their requests

    @property
    def num_in_flight(self) -> int:
        """Completions that were accepted and have not ended."""
        return self.admission.num_in_flight

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Returns the token IDs of one string. See `encode_batch`."""
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
        """Returns the token IDs of each string. A thread encodes long ones.

        Args:
          texts: the strings to encode.
          add_special_tokens: add the special tokens that the tokenizer puts around a text.
          param: the field that an error names.
          any_length: also encode strings that cannot fit the context.

        Raises:
          ContextLengthError: a string has more characters than any text that fits the context.
        """
        tokenizer = self.model.tokenizer

        def encode_all() -> list[list[int]]:
            for text in () if any_length else texts:
                self._check_chars(text, param)
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        is_short = sum(map(len, texts)) <= INLINE_CHARS
        return encode_all() if is_short else await asyncio.to_thread(encode_all)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Checks and admits a request immediately; returns the deltas of all its completions.

        Nothing runs before the first delta is requested. Close the generator (best by
        `contextlib.aclosing`) to abort the completions that have not ended.

        Raises:
          ContextLengthError: a prompt, or a prompt with the requested length, does not fit.
          InvalidRequestError: the request can never be served by this server.
          QueueFullError: too many completions are in flight now.
        """
        if request.num_completions > self.admission.limit:
            raise InvalidRequestError(
                f"{len(request.prompts)} prompts with n={request.params.n} ask for "
                f"{request.num_completions} completions; this server takes at most "
                f"{self.admission.limit} at a time",
                param=request.prompt_field,
            )
        tasks = resolve(request, self.model, arrival_s=time.monotonic())
        return self._run(tasks, request.request_id, self.admission.admit(request.num_completions))

    def abort(self, request_id: str | None) -> int:
        """Aborts the completions of every request with this ID, or all with None.

        Their last delta has the finish reason "abort". Returns the number of completions.
        """
        ids = [
            completion_id
            for completion_id, owner in self._running.items()
            if request_id is None or owner == request_id
        ]
        self.engine.abort(ids)
        return len(ids)

    async def _run(
        self, tasks: list[CompletionTask], owner: str, permit: Permit
    ) -> AsyncGenerator[Delta, None]:
        self._running |= {task.submit.request_id: owner for task in tasks}
        tokenizer = self.model.tokenizer
        streams = [stream_completion(t, self.engine, tokenizer, self.metrics) for t in tasks]
        try:
            async with aclosing(merge(streams)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            permit.release()
            for task in tasks:
                del self._running[task.submit.request_id]
            longest = max(task.record.num_generated for task in tasks)
            self.metrics.max_generation_tokens.observe(longest)

    def _check_chars(self, text: str, param: str) -> None:
        """Refuses a string that cannot fit the context, before the work of encoding it."""
        limit = self.model.max_model_len
        if len(text) <= limit:
            return
        at_least = -(-len(text) // self.model.longest_token)
        if at_least > limit:
            raise ContextLengthError(
                f"the maximum context length is {limit} tokens, but the prompt has "
                f"{len(text)} characters, which are at least {at_least} tokens",
                param=param,
            )
