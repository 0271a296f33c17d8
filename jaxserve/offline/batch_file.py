"""Reads requests and writes results in the batch format of the OpenAI API.

The input and the output have one JSON object on each line:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...",
     "body": {...}}, "error": null}

A request that was refused or failed gets the status and the body of the server, which is
``{"error": {...}}``. A line that is not a request gets no response, but an ``error`` with a
``code`` and a ``message``.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.decoding import decode
from jaxserve.openai.errors import error_reply

OK = 200


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the input; ``body`` is raw JSON."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the input that is not a request; ``custom_id`` is None if the line has none."""

    custom_id: str | None
    reason: str


class BatchResponse(msgspec.Struct, frozen=True):
    """The reply of the server to the same request."""

    status_code: int
    request_id: str
    body: Any


class BatchError(msgspec.Struct, frozen=True):
    """The reason why a line has no response."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """A line of the output: a response, or an error if the request never ran."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None = None

    @classmethod
    def of_body(cls, custom_id: str, body: Any) -> BatchResult:
        """Returns the result of a request that was answered."""
        return cls(_new_id(), custom_id, BatchResponse(OK, _new_id(), body))

    @classmethod
    def of_error(cls, custom_id: str, error: Exception) -> BatchResult:
        """Returns the result of a request that was refused or failed."""
        reply = error_reply(error)
        return cls(_new_id(), custom_id, BatchResponse(reply.status, _new_id(), reply.body))

    @classmethod
    def of_bad_line(cls, custom_id: str | None, reason: str) -> BatchResult:
        """Returns the result of a line that is not a request to a known endpoint."""
        return cls(_new_id(), custom_id, None, BatchError("invalid_line", reason))


async def read_requests(
    lines: AsyncIterator[bytes],
) -> AsyncGenerator[BatchRequest | BadLine, None]:
    """Yields the requests of the lines of a file, reading each when it is needed.

    Skips empty lines. A line may start with a byte order mark.
    """
    first_line_of: dict[str, int] = {}
    number = 0
    async for line in lines:
        number += 1
        if not line.strip():
            continue
        request = _parse(line, number)
        if isinstance(request, BatchRequest):
            first = first_line_of.setdefault(request.custom_id, number)
            if first != number:
                request = _bad_line(
                    request.custom_id, number, f"its custom_id was used before, in line {first}"
                )
        yield request


def _parse(line: bytes, number: int) -> BatchRequest | BadLine:
    try:
        return decode(line, BatchRequest)
    except InvalidRequestError as error:
        custom_id = None
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            custom_id = msgspec.json.decode(line, type=_WithId).custom_id
        return _bad_line(custom_id, number, error.message)


class _WithId(msgspec.Struct):
    """The only field to read from a line that holds no valid request."""

    custom_id: str


def _bad_line(custom_id: str | None, number: int, reason: str) -> BadLine:
    return BadLine(custom_id, f"line {number} of the input: {reason}")


def _new_id() -> str:
    return f"batch-{uuid.uuid4().hex}"
