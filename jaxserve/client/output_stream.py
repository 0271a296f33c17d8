"""The way of one request's outputs to its reader."""

from __future__ import annotations

import asyncio

import msgspec

from jaxserve.errors import JaxserveError
from jaxserve.ipc.messages import RequestOutput


class OutputStream:
    """Holds at most one output: what comes before it is read is merged into it.

    So a slow reader costs no queue, and gets more at once instead. One task reads; writer and
    reader run on the same event loop. Outputs belong to the stream from the moment they are pushed.
    """

    __slots__ = ("_ended", "_error", "_output", "_waiter")

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: JaxserveError | None = None
        self._ended = False
        # Not an asyncio.Event: with one reader, a future a turn does the same in half of the time.
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> None:
        """Adds the next output."""
        self._output = output if self._output is None else merged(self._output, output)
        self._wake()

    def fail(self, error: JaxserveError) -> None:
        """Ends the stream with an error, after the output that is still to be read."""
        self._error = error
        self._wake()

    def __aiter__(self) -> OutputStream:
        """What comes, as it comes, up to the output that has a finish reason."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Waits for what has come since the last call. Raises what `fail` was given."""
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
    """Two outputs of one request as one. The lists of ``first`` are extended, not copied."""
    first.token_ids.extend(second.token_ids)
    if first.logprobs is not None and second.logprobs is not None:
        first.logprobs.extend(second.logprobs)
    logprobs = second.logprobs if first.logprobs is None else first.logprobs
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
