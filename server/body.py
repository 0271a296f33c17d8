"""Reads the JSON body and the ID of a request."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jaxserve.config import MIB
from jaxserve.errors import InvalidRequestError
from jaxserve.openai.decoding import decode
from jaxserve.openai.json_structure import MAX_DIGITS, JsonStructure
from server.body_memory import CLOSE, BodyMemory, BodyShare
from server.content_encoding import PIECE_BYTES, decoder_of
from server.middleware import is_good_id
from server.settings import ApiSettings

T = TypeVar("T")


async def read_json(request: Request, body_type: type[T]) -> T:
    """Returns the body as a struct.

    Raises:
      HTTPException: the body exceeds a limit of size, structure, time or memory, is compressed in
        an unsupported way, or has another content type.
      InvalidRequestError: the body is not JSON, or does not fit ``body_type``.
    """
    _check_content_type(request)
    settings: ApiSettings = request.app.state.settings
    memory: BodyMemory = request.app.state.body_memory
    with memory.share() as share:
        try:
            async with asyncio.timeout(settings.body_timeout) as timeout:
                share.on_evicted = partial(timeout.reschedule, 0.0)
                body = await _receive(request, settings, share)
                share.received()
        except TimeoutError as error:
            if share.is_evicted:
                raise share.too_slow() from error
            raise HTTPException(
                408,
                f"the body did not arrive within {settings.body_timeout:g} s",
                CLOSE,
            ) from error
        return decode(body, body_type)


async def _receive(request: Request, settings: ApiSettings, share: BodyShare) -> bytearray:
    """Returns the decompressed body. Counts it while it arrives, and stops at the first limit."""
    decoder = decoder_of(request.headers.get("content-encoding", ""))
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    # A content-length may be missing or wrong, so the received bytes are counted too.
    num_received = 0
    body, structure = bytearray(), JsonStructure()
    async for chunk in request.stream():
        num_received += len(chunk)
        for piece in decoder.pieces(chunk):
            if max(num_received, len(body) + len(piece)) > limit:
                raise _too_large(limit)
            share.grow_to(len(body) + len(piece))
            body += piece
            structure.add(piece)
            if structure.size > settings.max_json_structure_bytes:
                raise _too_complex(settings.max_json_structure_bytes)
            if len(chunk) > PIECE_BYTES or len(piece) == PIECE_BYTES:
                await asyncio.sleep(0)  # other requests continue between the pieces
    decoder.finish()
    if structure.has_long_number:
        raise InvalidRequestError(f"the body has a number of more than {MAX_DIGITS} digits")
    return body


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
    return HTTPException(413, f"the body exceeds this server's limit of {limit / MIB:g} MiB", CLOSE)


def _too_complex(limit: int) -> HTTPException:
    return HTTPException(
        413,
        f"the body has more than {limit / MIB:g} MiB of JSON structure, which is slow to decode: "
        "numbers, brackets, quotes, escapes, text; see --max-json-structure-mib",
        CLOSE,
    )
