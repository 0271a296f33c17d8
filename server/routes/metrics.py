"""GET /metrics."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.metrics import CONTENT_TYPE, render


async def metrics(request: Request) -> Response:
    """For Prometheus; empty until there is something to count."""
    state = request.app.state
    if state.server.text_engine is None:
        return Response(media_type=CONTENT_TYPE)
    page = render(state.server.text_engine, prefix=state.settings.metrics_prefix)
    return Response(page, headers={"content-type": CONTENT_TYPE})


routes = [Route("/metrics", metrics)]
