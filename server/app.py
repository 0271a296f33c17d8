"""The ASGI application. It uses no globals and handles no signals: any ASGI server can host it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxserve.config import MIB
from jaxserve.front.counts import BODY_BYTES, Gauge
from server.body_memory import BodyMemory
from server.errors import HANDLERS, CatchUnexpected
from server.middleware import ApiKey, ForeignPages, LastSlash, RequestId, RootPath
from server.routes import openai, openapi, service, tokenize
from server.settings import ApiSettings
from server.state import ServerState

ROUTES = [*openai.routes, *service.routes, *tokenize.routes, *openapi.routes]


def create_app(
    state: ServerState, settings: ApiSettings | None = None, *, is_local: bool = False
) -> Starlette:
    """Returns an application that serves the OpenAI API with ``state.text_engine``.

    ``state.text_engine`` may be set later: until then /health and the API answer 503. Set
    ``state.draining`` to refuse new requests while those in flight finish.

    Args:
      state: shared with the caller, who updates it as the server starts and stops.
      settings: defaults to `ApiSettings` without changes.
      is_local: only this machine can reach the server. The ``Host`` header is then checked even
        without ``allowed_hosts``, unless API keys are set.
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
    # API keys already keep foreign pages out: a page does not know a key, and browsers do not add
    # one by themselves.
    has_keys = bool(settings.api_key)
    if settings.allowed_hosts or not has_keys:
        checks_hosts = bool(settings.allowed_hosts) or is_local
        middleware.append(
            Middleware(
                ForeignPages,
                hosts=settings.allowed_hosts if checks_hosts else None,
                origins=("*",) if has_keys else settings.allowed_origins,
            )
        )
    if has_keys:
        middleware.append(Middleware(ApiKey, keys=settings.api_key))
    # After the checks, which are thus made on the path as it was sent.
    middleware.append(Middleware(LastSlash))
    middleware.append(Middleware(CatchUnexpected))
    app = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.settings = settings
    app.state.body_memory = BodyMemory(
        settings.max_body_memory_mib * MIB, Gauge(state.counts, BODY_BYTES)
    )
    return app
