"""POST /v1/completions."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.openai import completions
from jaxserve.openai.protocol import CompletionRequest
from server.body import read_json, request_id
from server.sse import reply_stream, reply_whole


async def create(request: Request) -> Response:
    """Continues a prompt."""
    text_engine = request.app.state.server.serving()
    body = await read_json(request, CompletionRequest)
    job = await completions.prepare(
        text_engine, body, request_id=request_id(request, body.request_id)
    )
    if body.stream:
        return await reply_stream(request, completions.stream(job))
    return await reply_whole(request, completions.complete(job))


routes = [Route("/v1/completions", create, methods=["POST"])]
