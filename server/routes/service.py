"""Routes about the service itself: health probes, model names, metrics, server state and aborts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.errors import InvalidRequestError, UnknownModelError
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import StepStats
from server.body import read_json
from server.metrics import CONTENT_TYPE, render
from server.state import ServerState

ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""The prefixes that replies put before the ID of their request."""


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of POST /abort: the ID of a request or of its reply, or ``abort_all``."""

    request_id: str | None = None
    abort_all: bool = False


async def health(request: Request) -> Response:
    """Returns 200 while the server can take requests, else 503 with the reason."""
    request.app.state.server.check_health()
    return Response()


async def live(request: Request) -> Response:
    """Returns 200 as long as the process responds."""
    return Response()


async def version(request: Request) -> Response:
    """Returns the version of jaxserve."""
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    """Returns the number of completions in flight."""
    return JSONResponse({"server_load": request.app.state.server.load()})


async def list_models(request: Request) -> JSONResponse:
    """Lists every name under which the model is served."""
    state: ServerState = request.app.state.server
    cards = [_card(state, name) for name in state.serving().model.names]
    return JSONResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> JSONResponse:
    """Returns the card of one model name. Raises UnknownModelError."""
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    served = state.serving().model.names
    if name not in served:
        raise UnknownModelError(name, served)
    return JSONResponse(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    text_engine = state.serving()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": text_engine.model.name,
        "parent": None,
        "max_model_len": text_engine.model.max_model_len,
        "permission": [],
    }


async def metrics(request: Request) -> Response:
    """Returns the page for Prometheus; it is empty until the engines have started."""
    state = request.app.state
    if state.server.text_engine is None:
        return Response(media_type=CONTENT_TYPE)
    page = render(state.server.text_engine, prefix=state.settings.metrics_prefix)
    return Response(page, headers={"content-type": CONTENT_TYPE})


async def server_info(request: Request) -> JSONResponse:
    """Returns the settings, the sizes chosen from them, and the state of the engines."""
    state: ServerState = request.app.state.server
    text_engine = state.serving()
    return JSONResponse({"version": __version__, **_facts(state, text_engine)})


def _facts(state: ServerState, text_engine: TextEngine) -> dict[str, Any]:
    ready = text_engine.engine.ready
    return {
        "models": list(text_engine.model.names),
        "max_model_len": text_engine.model.max_model_len,
        "vocab_size": text_engine.model.vocab_size,
        "has_chat_template": text_engine.model.chat_template is not None,
        "tool_call_parser": text_engine.model.tool_call_parser,
        "reasoning_parser": text_engine.model.reasoning_parser,
        "sampling_defaults": asdict(text_engine.model.defaults),
        "vllm_xargs": {p.name: {"kind": p.kind, "default": p.default} for p in ready.parameters},
        "max_queue": text_engine.admission.limit,
        "server_load": text_engine.num_in_flight,
        "engines": {str(i): _stats(s) for i, s in sorted(text_engine.engine.stats.items())},
        "block_size": ready.block_size,
        "num_blocks": ready.num_blocks,
        "max_num_seqs": ready.max_num_seqs,
        "max_num_batched_tokens": ready.max_num_batched_tokens,
        "api_server_count": state.api_server_count,
        "decisions": [list(decision) for decision in ready.decisions],
        "config": None if state.config is None else asdict(state.config),
    }


def _stats(stats: StepStats) -> dict[str, Any]:
    """Returns the state of an engine as JSON, without the figures of the missing prefix cache."""
    figures = msgspec.structs.asdict(stats)
    return {name: value for name, value in figures.items() if not name.startswith("prefix_")}


async def abort(request: Request) -> JSONResponse:
    """Ends requests in flight; their clients get what has been generated so far.

    Raises:
      InvalidRequestError: the body has both ``request_id`` and ``abort_all``, or neither.
    """
    state: ServerState = request.app.state.server
    state.serving()
    body = await read_json(request, AbortRequest)
    if (body.request_id is None) == (not body.abort_all):
        raise InvalidRequestError("send either request_id or abort_all", param="request_id")
    return JSONResponse({"aborted": await state.abort(_without_prefix(body.request_id))})


def _without_prefix(request_id: str | None) -> str | None:
    """Turns the ID of a reply into the ID of its request."""
    for prefix in ID_PREFIXES:
        if request_id is not None and request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id


routes = [
    Route("/v1/models", list_models),
    Route("/v1/models/{name:path}", show_model),
    Route("/health", health),
    Route("/live", live),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version),
    Route("/load", load),
    Route("/metrics", metrics),
    Route("/server_info", server_info),
    Route("/abort", abort, methods=["POST"]),
]
