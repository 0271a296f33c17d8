"""Probes: is it alive, can it serve, what is it, how busy is it."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve import __version__


async def health(request: Request) -> Response:
    """200 while requests can be served, else 503 with the reason."""
    request.app.state.server.check_health()
    return Response()


async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return Response()


async def version(request: Request) -> Response:
    """Of the software."""
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    """Answers in flight."""
    return JSONResponse({"server_load": request.app.state.server.load()})


routes = [
    Route("/health", health),
    Route("/live", live),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version),
    Route("/load", load),
]
