"""The endpoints for operators: health, load, models, metrics, settings, and abort."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.errors import InvalidRequestError, UnknownModelError
from server.body import read_json
from server.metrics import CONTENT_TYPE, render
from server.state import ServerState

ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""What the ID of a reply adds to the ID of its request."""


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of POST /abort: the ID of a request or of its reply, or all requests."""

    request_id: str | None = None
    abort_all: bool = False


async def health(request: Request) -> Response:
    """Replies 200 while requests can be served, else 503 with the reason."""
    request.app.state.server.check_health()
    return Response()


async def live(request: Request) -> Response:
    """Replies 200 as long as the process answers."""
    return Response()


async def version(request: Request) -> Response:
    """Replies with the version of the software."""
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    """Replies with the number of completions in flight."""
    return JSONResponse({"server_load": request.app.state.server.load()})


async def list_models(request: Request) -> JSONResponse:
    """Lists every name under which the model is served."""
    state: ServerState = request.app.state.server
    cards = [_card(state, name) for name in state.serving().model.names]
    return JSONResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> JSONResponse:
    """Describes one of the names."""
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    served = state.serving().model.names
    if name not in served:
        raise UnknownModelError(name, served)
    return JSONResponse(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    model = state.serving().model
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
    }


async def metrics(request: Request) -> Response:
    """Renders the metrics for Prometheus; empty until the engine is ready."""
    state = request.app.state
    if state.server.text_engine is None:
        return Response(media_type=CONTENT_TYPE)
    page = render(state.server.text_engine, prefix=state.settings.metrics_prefix)
    return Response(page, headers={"content-type": CONTENT_TYPE})


async def server_info(request: Request) -> JSONResponse:
    """Shows the settings, and the sizes that were decided from them."""
    state: ServerState = request.app.state.server
    text_engine = state.serving()
    model, ready = text_engine.model, text_engine.engine.ready
    stats = sorted(text_engine.engine.stats.items())
    return JSONResponse(
        {
            "version": __version__,
            "models": list(model.names),
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
            "has_chat_template": model.chat_template is not None,
            "tool_call_parser": model.tool_call_parser,
            "reasoning_parser": model.reasoning_parser,
            "sampling_defaults": asdict(model.defaults),
            "max_queue": text_engine.admission.limit,
            "server_load": text_engine.num_in_flight,
            "engines": {str(i): msgspec.structs.asdict(s) for i, s in stats},
            "block_size": ready.block_size,
            "num_blocks": ready.num_blocks,
            "max_num_seqs": ready.max_num_seqs,
            "max_num_batched_tokens": ready.max_num_batched_tokens,
            "decisions": [list(decision) for decision in ready.decisions],
            "config": None if state.config is None else asdict(state.config),
        }
    )


async def abort(request: Request) -> JSONResponse:
    """Aborts requests in flight; their replies hold what they have generated so far."""
    text_engine = request.app.state.server.serving()
    body = await read_json(request, AbortRequest)
    if (body.request_id is None) == (not body.abort_all):
        raise InvalidRequestError("send either request_id or abort_all", param="request_id")
    return JSONResponse({"aborted": text_engine.abort(_without_prefix(body.request_id))})


def _without_prefix(request_id: str | None) -> str | None:
    """Returns the ID of a request, given it or the ID of its reply."""
    for prefix in ID_PREFIXES:
        if request_id is not None and request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id


routes = [
    Route("/health", health),
    Route("/live", live),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version),
    Route("/load", load),
    Route("/v1/models", list_models),
    Route("/v1/models/{name:path}", show_model),
    Route("/metrics", metrics),
    Route("/server_info", server_info),
    Route("/abort", abort, methods=["POST"]),
]
