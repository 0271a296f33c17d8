"""POST /v1/responses, and what there would be if responses were stored."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.openai import responses
from jaxserve.openai.responses_protocol import ResponsesRequest
from server.body import read_json, request_id
from server.sse import NAMED, reply_stream, reply_whole


async def create(request: Request) -> Response:
    """Answers an input."""
    text_engine = request.app.state.server.serving()
    body = await read_json(request, ResponsesRequest)
    job = await responses.prepare(
        text_engine, body, request_id=request_id(request, body.request_id)
    )
    if body.stream:
        return await reply_stream(request, responses.stream(job), framing=NAMED)
    return await reply_whole(request, responses.complete(job))


async def show(request: Request) -> Response:
    """There is nothing to show, to cancel or to delete: nothing is stored."""
    raise HTTPException(404, "this server stores no responses")


routes = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/{response_id:path}", show, methods=["GET", "POST", "DELETE"]),
]
