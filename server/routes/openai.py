"""The endpoints that generate, as routes: one for each entry of `jaxserve.openai.endpoints`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.openai.endpoints import ENDPOINTS, Endpoint
from server.body import read_json, request_id
from server.sse import NAMED, PLAIN, reply_stream, reply_whole


def handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Returns what answers the requests to an endpoint."""
    framing = NAMED if endpoint.has_named_events else PLAIN

    async def create(request: Request) -> Response:
        text_engine = request.app.state.server.serving()
        body: Any = await read_json(request, endpoint.body)
        name = request_id(request, body.request_id)
        job = await endpoint.prepare(text_engine, body, request_id=name)
        if endpoint.stream is not None and body.stream:
            return await reply_stream(request, endpoint.stream(job), framing=framing)
        return await reply_whole(request, endpoint.complete(job))

    return create


async def stored_response(request: Request) -> Response:
    """Refuses to show, cancel or delete a response: the server stores none."""
    raise HTTPException(404, "this server stores no responses")


routes = [
    *(Route(path, handler(endpoint), methods=["POST"]) for path, endpoint in ENDPOINTS.items()),
    Route("/v1/responses/{response_id:path}", stored_response, methods=["GET", "POST", "DELETE"]),
]
