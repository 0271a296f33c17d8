"""Reads the JSON body of a request, and its id."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jaxserve.config import MIB
from jaxserve.openai.decoding import decode
from server.middleware import is_good_id
from server.settings import ApiSettings

T = TypeVar("T")


async def read_json(request: Request, body_type: type[T]) -> T:
    """The body as a struct.

    Raises:
      HTTPException: the body is too large, too slow, or of another content type.
      InvalidRequestError: it is not JSON, or not of this type.
    """
    _check_content_type(request)
    settings: ApiSettings = request.app.state.settings
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    # What is declared need not be true, or there at all, so what comes is counted.
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError as error:
        raise HTTPException(
            408,
            f"the body did not come within {settings.body_timeout:g} s",
            {"Connection": "close"},
        ) from error
    return decode(bytes(body), body_type)


def request_id(request: Request, own: str | None) -> str:
    """The id of a request: that of its header, else ``own`` of its body, else the one it got."""
    state = request.state
    if own is not None and not state.has_own_id and is_good_id(own):
        state.request_id = own
    return state.request_id


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type")
    # A web page can send a body without a content type to any origin without asking first, so
    # only what is no web page may leave it out.
    if given is None and "origin" not in request.headers:
        return
    if (given or "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(
            400, f"the body must be sent as Content-Type: application/json, got {given!r:.100}"
        )


def _too_large(limit: int) -> HTTPException:
    # The rest of the body is not read, so the connection is of no more use.
    return HTTPException(
        413,
        f"the body is larger than the {limit / MIB:g} MiB that this server takes",
        {"Connection": "close"},
    )
