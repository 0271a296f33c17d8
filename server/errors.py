"""Turns every error into a JSON body of the same shape, whatever raised it."""

from __future__ import annotations

import logging
import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.openai.errors import ErrorReply, error_reply, log_failure, make_error

logger = logging.getLogger(__name__)

API_PREFIX = "/v1"
RETRY_AFTER_S = {429: "1", 503: "5"}
TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}


def to_response(reply: ErrorReply, headers: dict[str, str] | None = None) -> Response:
    """Returns the HTTP response of an error, with ``Retry-After`` where a retry makes sense."""
    headers = dict(headers or {})
    if reply.status in RETRY_AFTER_S:
        headers["Retry-After"] = RETRY_AFTER_S[reply.status]
    return Response(
        msgspec.json.encode(reply.body),
        status_code=reply.status,
        headers=headers,
        media_type="application/json",
    )


def on_jaxserve_error(request: Request, error: Exception) -> Response:
    """Responds to errors of jaxserve."""
    log_failure(logger, "a request failed", error)
    return to_response(error_reply(error))


def on_http_error(request: Request, error: Exception) -> Response:
    """Responds to errors of the HTTP layer: unknown path, wrong method, body too large..."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404 and "endpoint" not in request.scope:  # no route matches
        message = _no_such_path(request)
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{_path(request)} does not support {request.method}; use {allowed}"
    kind = TYPES.get(error.status_code, "BadRequestError")
    reply = make_error(error.status_code, message, type=kind)
    return to_response(reply, dict(error.headers or {}))


def on_disconnect(request: Request, error: Exception) -> Response:
    """Returns a response that nobody reads: the client has disconnected."""
    return Response(status_code=499)


HANDLERS = {
    JaxserveError: on_jaxserve_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
}


class CatchUnexpected:
    """Responds with a plain 500 to unexpected exceptions, and logs their tracebacks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        except Exception as error:
            logger.exception("a request failed")
            if started:
                raise
            await to_response(error_reply(error))(scope, receive, send)


def _no_such_path(request: Request) -> str:
    """Returns the message for an unknown path. Most such paths result from a wrong base URL."""
    path = _path(request)
    plain = re.sub("//+", "/", path).rstrip("/")
    known = [route.path for route in request.app.routes]
    for right in known:
        in_api = right.startswith(API_PREFIX)
        if right in (plain, API_PREFIX + plain) or (in_api and plain.endswith(right)):
            return (
                f"there is nothing at {path}; did you mean {right}? "
                f"The base URL of the API is the server's URL followed by {API_PREFIX}"
            )
    return f"there is nothing at {path}; the API is under {API_PREFIX}"


def _path(request: Request) -> str:
    return request.scope["path"][:200]
