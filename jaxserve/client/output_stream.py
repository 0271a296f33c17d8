"""The stream of one request's outputs, from an engine to the reader in the front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from jaxserve.errors import JaxserveError
from jaxserve.ipc.messages import RequestOutput


class OutputStream:
    """Buffers at most one output: outputs pushed before it is read are merged into it.

    So a slow reader gets more tokens at once, and no queue grows. One task reads. Writer and reader
    run on the same event loop. The stream owns the outputs that are pushed, and may change their
    lists.

    Attributes:
      is_closed: whether the engine has nothing more to do for the request.
    """

    __slots__ = ("_ended", "_error", "_on_ended", "_output", "_waiter", "is_closed")

    def __init__(self, on_ended: Callable[[], None] | None = None) -> None:
        """``on_ended`` is called once, when the stream gets its last output, fails or is closed."""
        self.is_closed = False
        self._on_ended = on_ended
        self._output: RequestOutput | None = None
        self._error: JaxserveError | None = None
        self._ended = False
        # One future for each wait: for one reader, this takes half the time of an asyncio.Event.
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> None:
        """Appends an output and wakes the reader."""
        self._output = output if self._output is None else merged(self._output, output)
        if output.finish_reason is not None:
            self.close()
        self._wake()

    def fail(self, error: JaxserveError) -> None:
        """Ends the stream with an error. The reader gets the buffered output first."""
        self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Says that the engine has nothing more to do for the request. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            if self._on_ended is not None:
                self._on_ended()

    def __aiter__(self) -> OutputStream:
        """Iterates over outputs until one has a finish reason."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Waits for output, and returns all of it since the last call.

        Raises:
          JaxserveError: the error passed to `fail`.
        """
        if self._ended:
            raise StopAsyncIteration
        if self._output is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._output is not None:
            output, self._output = self._output, None
            self._ended = output.finish_reason is not None
            return output
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merges two consecutive outputs of a request. Extends the lists of ``first`` in place."""
    first.token_ids.extend(second.token_ids)
    if first.logprobs is not None and second.logprobs is not None:
        first.logprobs.extend(second.logprobs)
    logprobs = second.logprobs if first.logprobs is None else first.logprobs
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids,
        logprobs=logprobs,
        # An abort on the side of the front does not know these.
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        scheduled_s=second.scheduled_s or first.scheduled_s,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
