"""GET /v1/models and GET /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxserve.errors import UnknownModelError
from server.state import ServerState


async def list_models(request: Request) -> JSONResponse:
    """Every name under which the model is served."""
    state: ServerState = request.app.state.server
    cards = [_card(state, name) for name in state.serving().model.names]
    return JSONResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> JSONResponse:
    """One of the names."""
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


routes = [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]
