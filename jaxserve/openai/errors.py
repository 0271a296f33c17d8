"""Errors in the form of the OpenAI API: one body for all, and a status for each class."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import msgspec

from jaxserve.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    QueueFullError,
    RequestFailedError,
    UnavailableError,
    UnknownModelError,
)

MAX_MESSAGE_CHARS = 2000
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error of the API.

    Attributes:
      message: for people.
      type: the class of the error, such as "BadRequestError".
      param: the field at fault, or None.
      code: the name of the error if it has one, else the HTTP status.
    """

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error reply, and of the event that ends a stream with an error."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The HTTP status and the body of an error."""

    status: int
    body: ErrorBody


@dataclass(frozen=True, slots=True)
class _Kind:
    """The status of a class of errors, and their ``type`` and ``code`` (None: the status)."""

    status: int
    type: str
    code: str | None = None


# The first match is used, so subclasses come before their bases.
_KINDS: tuple[tuple[type[JaxserveError], _Kind], ...] = (
    (ContextLengthError, _Kind(400, "BadRequestError", "context_length_exceeded")),
    (InvalidRequestError, _Kind(400, "BadRequestError")),
    (UnknownModelError, _Kind(404, "NotFoundError", "model_not_found")),
    (QueueFullError, _Kind(429, "RateLimitError", "queue_full")),
    (EngineDeadError, _Kind(503, "ServiceUnavailableError")),
    (UnavailableError, _Kind(503, "ServiceUnavailableError")),
    (RequestFailedError, _Kind(500, "InternalServerError")),
)


def error_reply(error: Exception) -> ErrorReply:
    """Returns the reply for an error. Unexpected errors reveal nothing to the client."""
    for error_type, kind in _KINDS:
        if isinstance(error, error_type):
            param = "model" if isinstance(error, UnknownModelError) else None
            return make_error(
                kind.status,
                str(error),
                type=kind.type,
                param=error.param if isinstance(error, InvalidRequestError) else param,
                code=kind.code,
            )
    return make_error(500, "Internal server error", type="InternalServerError")


def log_failure(logger: logging.Logger, what: str, error: Exception) -> None:
    """Logs an error whose reply has the status 500; others are the client's or the load's.

    An error of jaxserve says everything in one line, which many requests may share when an engine
    fails. Any other error is a defect, and its traceback is logged.
    """
    if error_reply(error).status == 500:
        defect = None if isinstance(error, JaxserveError) else error
        logger.error("%s: %s", what, error, exc_info=defect)


def make_error(
    status: int, message: str, *, type: str, param: str | None = None, code: str | None = None
) -> ErrorReply:
    """Returns an error reply. ``code`` defaults to the status.

    Long messages are cut, and addresses of Python objects are removed from them.
    """
    message = _ADDRESS.sub("", message[:MAX_MESSAGE_CHARS])
    return ErrorReply(status, ErrorBody(ErrorInfo(message, type, param, code or status)))
