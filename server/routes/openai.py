"""The POST routes of `jaxserve.openai.endpoints`, and the refusal of stored responses."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.openai.endpoints import ENDPOINTS, Endpoint
from server.body import read_json, request_id
from server.sse import FRAMINGS, reply_stream, reply_whole, unless_disconnected
from server.state import ServerState


async def create(request: Request, *, endpoint: Endpoint) -> Response:
    """Runs the request in the body, and replies whole or as a stream of events."""
    server: ServerState = request.app.state.server
    text_engine = server.serving()
    body = await read_json(request, endpoint.body_type)
    preparing = endpoint.prepare(text_engine, body, request_id=request_id(request, body.request_id))
    if endpoint.stream is not None and body.stream:
        job = await unless_disconnected(request.receive, preparing)
        framing = FRAMINGS[endpoint.framing]
        stream = endpoint.stream(job)
        return await reply_stream(request, stream, text_engine.memory, framing=framing)

    async def whole() -> msgspec.Struct:
        return await endpoint.complete(await preparing)

    reply = await reply_whole(request, whole(), text_engine.memory)
    # Half a reply with the status 200 would pass for a whole one; a 503 is tried again elsewhere.
    server.check_whole()
    return reply


async def stored_response(request: Request) -> Response:
    """Refuses to show, cancel or delete a response: none is stored."""
    raise HTTPException(404, "this server stores no responses")


async def no_such_endpoint(request: Request) -> Response:
    """Says that a path under /v1/responses is missing: it is not a stored response."""
    path = request.scope["path"][:200]
    raise HTTPException(404, f"there is nothing at {path}; send requests to /v1/responses")


routes = [
    *(
        Route(path, partial(create, endpoint=endpoint), methods=["POST"])
        for path, endpoint in ENDPOINTS.items()
    ),
    Route("/v1/responses/{response_id}", stored_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{name}", no_such_endpoint, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", stored_response),
    Route("/v1/responses/{response_id}/cancel", stored_response, methods=["POST"]),
]
