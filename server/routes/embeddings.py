"""POST /v1/embeddings."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.openai import embeddings
from jaxserve.openai.embeddings import EmbeddingRequest
from server.body import read_json, request_id
from server.sse import reply_whole


async def create(request: Request) -> Response:
    """The vectors of prompts."""
    text_engine = request.app.state.server.serving()
    body = await read_json(request, EmbeddingRequest)
    name = request_id(request, body.request_id)
    job = await embeddings.prepare(text_engine, body, request_id=name)
    return await reply_whole(request, embeddings.complete(job))


routes = [Route("/v1/embeddings", create, methods=["POST"])]
