"""Reads the JSON body and the ID of a request."""

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
    """Returns the body as a struct.

    Raises:
      HTTPException: the body is too large, arrives too slowly, or has another content type.
      InvalidRequestError: the body is not JSON, or does not fit ``body_type``.
    """
    _check_content_type(request)
    settings: ApiSettings = request.app.state.settings
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    # A content-length may be missing or wrong, so the received bytes are counted too.
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
            f"the body did not arrive within {settings.body_timeout:g} s",
            {"Connection": "close"},
        ) from error
    return decode(bytes(body), body_type)


def request_id(request: Request, own: str | None) -> str:
    """Returns the ID from the header, else ``own`` from the body, else the generated one."""
    state = request.state
    if own is not None and not state.has_own_id and is_good_id(own):
        state.request_id = own
    return state.request_id


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type")
    # A browser sends a body without a content type to a foreign server without asking that server
    # first (preflight). So a request from a browser, which has an origin, must have a content type.
    if given is None and "origin" not in request.headers:
        return
    if (given or "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(400, f"the Content-Type must be application/json, got {given!r:.100}")


def _too_large(limit: int) -> HTTPException:
    # The rest of the body stays unread, so the connection cannot be used again.
    return HTTPException(
        413,
        f"the body exceeds this server's limit of {limit / MIB:g} MiB",
        {"Connection": "close"},
    )
