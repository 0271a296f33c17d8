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

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from jaxserve.errors import ConfigError, InvalidRequestError
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


def read_requests(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Yields the requests of a file, reading each line when it is needed. Skips empty lines."""
    first_line_of: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
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


class ResultFile:
    """The output file.

    Each result goes to the operating system as soon as it is written, so that a crash of the
    program loses none.

    Attributes:
      answered: IDs of the requests that an earlier run has answered.
    """

    def __init__(self, file: IO[bytes], answered: frozenset[str]) -> None:
        """Use `create` or `resume`."""
        self._file = file
        self.answered = answered

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> ResultFile:
        """Creates the file. An empty file, which a run with a bad model leaves, is replaced.

        Raises:
          ConfigError: the file exists and ``overwrite`` is false.
        """
        is_free = overwrite or (path.is_file() and path.stat().st_size == 0)
        try:
            return cls(path.open("wb" if is_free else "xb"), frozenset())
        except FileExistsError:
            raise ConfigError(
                f"{path} already exists: --resume keeps its answers and continues, --overwrite "
                "replaces it"
            ) from None

    @classmethod
    def resume(cls, path: Path) -> ResultFile:
        """Opens the file and keeps the answers of an earlier run, if there was one.

        Errors are dropped, so that their requests run again. An incomplete last line is dropped
        too: the program ended while it was written.
        """
        if not path.exists():
            return cls.create(path, overwrite=False)
        answered: set[str] = set()
        kept = path.with_name(path.name + ".resuming")
        with path.open("rb") as old, kept.open("wb") as new:
            for line in old:
                custom_id = _answered_id(line)
                if custom_id is not None and custom_id not in answered:
                    answered.add(custom_id)
                    new.write(line)
        os.replace(kept, path)
        return cls(path.open("ab"), frozenset(answered))

    def write(self, result: BatchResult) -> None:
        """Appends a result."""
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Writes the whole file to the disk, and closes it."""
        os.fsync(self._file.fileno())
        self._file.close()


class _OldResponse(msgspec.Struct):
    status_code: int


class _OldResult(msgspec.Struct):
    custom_id: str
    response: _OldResponse | None


def _answered_id(line: bytes) -> str | None:
    """Returns the ID of the request that a complete line answers; None if it answers none."""
    if not line.endswith(b"\n"):
        return None
    try:
        old = msgspec.json.decode(line, type=_OldResult)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return old.custom_id if old.response and old.response.status_code == OK else None


def _new_id() -> str:
    return f"batch-{uuid.uuid4().hex}"
