"""The ASGI application. Any host can run it; it has no globals and handles no signals."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server.errors import HANDLERS, CatchUnexpected
from server.middleware import ApiKey, ForeignPages, RequestId, RootPath
from server.routes import (
    control,
    health,
    metrics,
    models,
    openai,
    openapi,
    tokenize,
)
from server.settings import ApiSettings
from server.state import ServerState

ROUTES = [
    *openai.routes,
    *models.routes,
    *health.routes,
    *tokenize.routes,
    *metrics.routes,
    *control.routes,
    *openapi.routes,
]


def create_app(
    state: ServerState, settings: ApiSettings | None = None, *, is_local: bool = False
) -> Starlette:
    """The OpenAI API in front of ``state.text_engine``.

    The engine may come later: until ``state.text_engine`` is set, /health and the API answer 503.
    Set ``state.draining`` to refuse new requests while those in flight finish. ``is_local``: only
    this machine can reach it, so the names under which it may be asked are limited.
    """
    settings = settings or ApiSettings()
    middleware = [Middleware(RequestId)]
    if settings.root_path:
        middleware.append(Middleware(RootPath, root_path=settings.root_path))
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    # A browser has no key to send for a page that does not know it.
    is_guarded = bool(settings.api_key)
    if settings.allowed_hosts or not is_guarded:
        checks_hosts = bool(settings.allowed_hosts) or is_local
        middleware.append(
            Middleware(
                ForeignPages,
                hosts=settings.allowed_hosts if checks_hosts else None,
                origins=("*",) if is_guarded else settings.allowed_origins,
            )
        )
    if is_guarded:
        middleware.append(Middleware(ApiKey, keys=settings.api_key))
    middleware.append(Middleware(CatchUnexpected))
    app = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=HANDLERS)
    app.state.server = state
    app.state.settings = settings
    return app
