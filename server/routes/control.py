"""GET /server_info and POST /abort: for who runs the server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from server.body import read_json
from server.state import ServerState

ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of POST /abort: the id of a request or of its reply, or all."""

    request_id: str | None = None
    abort_all: bool = False


async def server_info(request: Request) -> JSONResponse:
    """What is served and how: the settings, and what was decided from them."""
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
        "max_queue": text_engine.admission.limit,
        "server_load": text_engine.num_in_flight,
        "engines": {
            str(i): msgspec.structs.asdict(s) for i, s in sorted(text_engine.engine.stats.items())
        },
        "block_size": ready.block_size,
        "num_blocks": ready.num_blocks,
        "max_num_seqs": ready.max_num_seqs,
        "max_num_batched_tokens": ready.max_num_batched_tokens,
        "decisions": [list(decision) for decision in ready.decisions],
        "config": None if state.config is None else asdict(state.config),
    }


async def abort(request: Request) -> JSONResponse:
    """Ends requests in flight; what they have generated so far is their answer."""
    text_engine = request.app.state.server.serving()
    body = await read_json(request, AbortRequest)
    if (body.request_id is None) == (not body.abort_all):
        raise InvalidRequestError("send either request_id or abort_all", param="request_id")
    return JSONResponse({"aborted": text_engine.abort(_bare(body.request_id))})


def _bare(request_id: str | None) -> str | None:
    """The id of a request, from that of its reply."""
    for prefix in ID_PREFIXES:
        if request_id is not None and request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id


routes = [Route("/server_info", server_info), Route("/abort", abort, methods=["POST"])]
