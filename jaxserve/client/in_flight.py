"""One request in flight: what it takes to continue it on another engine."""

from __future__ import annotations

import msgspec

from jaxserve.client.output_stream import OutputStream
from jaxserve.ipc.messages import FinishReason, RequestOutput, Submit


class InFlight:
    """A request from the call of `generate` to its last output, over the deaths of engines.

    An engine that receives the prompt and the output so far continues as the dead one would have:
    a random number depends on the seed of the request and the position of the token only, and the
    engine replays the output into grammars and penalties.

    Attributes:
      submit: the request as the front made it.
      stream: its outputs.
      token_ids: the output so far.
      num_crashes: how many times an engine died while it may have been running the request.
      is_received: whether the engine has said that it has the request. Only engines that get a
        request after a crash say so.
    """

    __slots__ = (
        "_num_cached_tokens",
        "_scheduled_s",
        "is_received",
        "num_crashes",
        "stream",
        "submit",
        "token_ids",
    )

    def __init__(self, submit: Submit, stream: OutputStream) -> None:
        self.submit = submit
        self.stream = stream
        self.token_ids: list[int] = []
        self.num_crashes = 0
        self.is_received = False
        self._scheduled_s = 0.0
        self._num_cached_tokens = 0

    @property
    def id(self) -> str:
        """The ID of the request."""
        return self.submit.request_id

    def remaining(self) -> Submit:
        """Returns the request for the rest of its output."""
        if not self.token_ids and not self.num_crashes:
            return self.submit
        return msgspec.structs.replace(
            self.submit,
            prompt_token_ids=self.submit.prompt_token_ids + self.token_ids,
            num_prior_tokens=len(self.token_ids),
            num_crashes=self.num_crashes,
        )

    def push(self, output: RequestOutput) -> None:
        """Hands an output to the reader.

        All outputs have the scheduling time and the cached tokens of the first one: those of a
        later engine are about the resubmitted request.
        """
        if not self._scheduled_s:
            self._scheduled_s = output.scheduled_s
            self._num_cached_tokens = output.num_cached_tokens
        elif output.scheduled_s != self._scheduled_s:
            output = msgspec.structs.replace(
                output, scheduled_s=self._scheduled_s, num_cached_tokens=self._num_cached_tokens
            )
        self.token_ids += output.token_ids
        self.stream.push(output)

    def abort(self) -> None:
        """Ends the stream with reason ABORT."""
        self.push(RequestOutput(self.id, [], FinishReason.ABORT))
