"""Runs requests for text on an engine: admits them, encodes prompts and streams completions."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from jaxserve.client.protocol import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.front.admission import AdmissionLimit, Permit
from jaxserve.front.concurrency import merge
from jaxserve.front.counts import IN_FLIGHT, Counts, Gauge, LocalCounts
from jaxserve.front.grammar_checks import GrammarChecks
from jaxserve.front.long_text import encode_within
from jaxserve.front.memory import FreedMemory
from jaxserve.front.metrics import RequestMetrics, num_cells
from jaxserve.front.outputs import Delta, stream_completion
from jaxserve.front.requests import CompletionTask, GenerateRequest, resolve
from jaxserve.front.served_model import ServedModel
from jaxserve.front.work_pool import Caller, WorkPool

T = TypeVar("T")

INLINE_CHARS = 400
"""Strings of at most this length in total are encoded and rendered on the event loop: handing them
to a thread would take longer."""

MEASURED_SIZE = 20_000
"""The largest size of a request that is counted exactly. Counting takes at most 2 ms."""

INLINE_SIZE = 2000
"""Other work of at most this size, in values and characters, is done on the event loop. It takes
less than a millisecond."""

MAX_TEXT_CALLS = 64
"""The most calls of /tokenize and /detokenize in flight."""


class TextEngine:
    """Runs requests of one model on one engine, or on a client of several.

    Everything that takes long for a large request runs in threads. Rendering has a pool, encoding
    has one, and all other Python code (checks, conversions, large parts of replies) has one. Python
    code in one thread makes the event loop wait for at most 5 ms at a time. More threads would not
    do more work, because they share the interpreter. Encoding does not need the interpreter, so
    its pool has several threads.

    Args:
      engine: runs token IDs.
      model: the facts about the model that the engine runs.
      max_in_flight: the most completions in flight; each of ``n`` counts, for each prompt. Requests
        over this limit are refused.
      counts: where requests are counted, and limited together with those of other processes; None:
        in this process only.

    Attributes:
      engine: as above.
      model: as above.
      counts: as above.
      admission: counts the completions in flight.
      text_calls: counts calls that only encode or decode text.
      text_pool: runs these calls.
      metrics: counts and times of the requests of this process.
      grammars: checks the grammars of requests.
      memory: gives memory back after large work.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        max_in_flight: int = 1024,
        counts: Counts | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.counts: Counts = counts or LocalCounts(num_cells(len(engine.stats)))
        self.admission = AdmissionLimit(max_in_flight, in_flight=Gauge(self.counts, IN_FLIGHT))
        self.text_calls = AdmissionLimit(
            min(max_in_flight, MAX_TEXT_CALLS), unit="calls of /tokenize and /detokenize"
        )
        self.metrics = RequestMetrics(model.max_model_len, self.counts.own)
        self.grammars = GrammarChecks(
            model.tokenizer, model.vocab_size, max_in_flight=max_in_flight
        )
        self.memory = FreedMemory()
        # A request waits in one queue at a time, so the permits limit all of these queues.
        threads = min(os.cpu_count() or 1, 4)
        self.text_pool = WorkPool("tokenize", max_waiting=max_in_flight)
        self._encode_pool = WorkPool("encode", num_threads=threads, max_waiting=max_in_flight)
        self._render_pool = WorkPool("render", max_waiting=max_in_flight)
        self._build_pool = WorkPool("build", max_waiting=max_in_flight)
        self._running: dict[str, str] = {}  # IDs of completions -> IDs of their requests

    def close(self) -> None:
        """Ends the threads and the processes of the front; any thread may call it.

        The engine stays as it is. No request may be in flight.
        """
        for pool in (self.text_pool, self._encode_pool, self._render_pool, self._build_pool):
            pool.close()
        self.grammars.close()

    @property
    def num_in_flight(self) -> int:
        """Completions of the server that were accepted and that no engine has ended."""
        return self.admission.num_in_flight

    @contextmanager
    def admit(self, num_prompts: int, n: int, *, param: str = "prompt") -> Iterator[Permit]:
        """Takes a permit for ``n`` completions of each prompt; an error in the block returns it.

        Call it before any work for a request, and pass the permit to `start`.

        Raises:
          InvalidRequestError: this server never runs so many at a time; names the field ``param``.
          QueueFullError: too many completions are in flight now.
        """
        permit = self._permit(num_prompts, n, param)
        try:
            yield permit
        except BaseException:
            permit.release()
            raise

    async def build(self, work: Callable[[], T], *, size: int) -> T:
        """Returns the result of Python code for a request; a thread runs it if it is large."""
        return await self._run_in(self._build_pool, work, size, INLINE_SIZE)

    async def render(self, work: Callable[[], T], *, size: int) -> T:
        """Returns the result of rendering a template; a thread runs it if it is large."""
        return await self._run_in(self._render_pool, work, size, INLINE_CHARS)

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
        most_tokens: int | None = None,
    ) -> list[list[int]]:
        """Returns the token IDs of each string. A thread encodes long ones.

        Args:
          texts: the strings to encode.
          add_special_tokens: add the special tokens that the tokenizer puts around a text.
          param: the field that an error names.
          most_tokens: a string that has certainly more tokens is refused; None: those that fit the
            context.

        Raises:
          ContextLengthError: a string certainly does not fit the context. One that is a little too
            long may be encoded: the caller counts the tokens.
          InvalidRequestError: a string has more tokens than ``most_tokens``, or lone surrogates.
        """
        model, limit = self.model, most_tokens or self.model.max_model_len

        def encode_all(caller: Caller) -> list[list[int]]:
            try:
                return [
                    encode_within(model, text, limit, caller, add_special_tokens=add_special_tokens)
                    for text in texts
                ]
            except InvalidRequestError as error:
                raise type(error)(error.message, param=param) from error

        size = sum(map(len, texts))
        if size <= INLINE_CHARS:
            return encode_all(Caller())
        try:
            return await self._encode_pool.run(encode_all, size=size)
        finally:
            self.memory.after(size)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Checks and admits a request immediately; returns the deltas of all its completions.

        Nothing runs before the first delta is requested. Close the generator (best by
        `contextlib.aclosing`) to abort the completions that have not ended.

        Raises:
          ContextLengthError: a prompt, or a prompt with the requested length, does not fit.
          InvalidRequestError: the request can never be served by this server.
          QueueFullError: too many completions are in flight now.
        """
        num_prompts, n = len(request.prompts), request.params.n
        with self.admit(num_prompts, n, param=request.prompt_field) as permit:
            tasks = resolve(request, self.model, arrival_s=time.monotonic())
            return self._run(tasks, request.request_id, permit)

    async def start(self, request: GenerateRequest, permit: Permit) -> AsyncGenerator[Delta, None]:
        """Does the same as `generate` for a request that has been admitted.

        A thread checks a large request. The generator returns the permit; each completion stops
        counting when the engine is done with it, whether or not anybody reads its deltas.
        """
        arrival_s = time.monotonic()
        tasks = await self.build(
            lambda: resolve(request, self.model, arrival_s=arrival_s), size=request.size
        )
        return self._run(tasks, request.request_id, permit)

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
        streams = [
            stream_completion(
                task, self.engine, tokenizer, self.metrics, on_ended=permit.release_one
            )
            for task in tasks
        ]
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

    def _permit(self, num_prompts: int, n: int, param: str) -> Permit:
        num_completions = num_prompts * n
        if num_completions > self.admission.limit:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={n} ask for {num_completions} completions; this "
                f"server takes at most {self.admission.limit} at a time",
                param=param,
            )
        return self.admission.admit(num_completions)

    async def _run_in(
        self, pool: WorkPool, work: Callable[[], T], size: int, most_inline: int
    ) -> T:
        if size <= most_inline:
            return work()
        try:
            return await pool.run(lambda _: work(), size=size)
        finally:
            self.memory.after(size)
