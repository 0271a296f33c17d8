"""POST /v1/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.openai import chat
from jaxserve.openai.protocol import ChatRequest
from server.body import read_json, request_id
from server.sse import reply_stream, reply_whole


async def create(request: Request) -> Response:
    """Answers the last message of a chat."""
    text_engine = request.app.state.server.serving()
    body = await read_json(request, ChatRequest)
    job = await chat.prepare(text_engine, body, request_id=request_id(request, body.request_id))
    if body.stream:
        return await reply_stream(request, chat.stream(job))
    return await reply_whole(request, chat.complete(job))


routes = [Route("/v1/chat/completions", create, methods=["POST"])]
