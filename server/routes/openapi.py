"""GET /openapi.json: a description of the API, made from the structs that read and write it."""

from __future__ import annotations

import functools
from types import UnionType
from typing import Any, get_args

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.openai.endpoints import ENDPOINTS
from jaxserve.openai.errors import ErrorBody
from jaxserve.openai.protocol import DetokenizeRequest, TokenizeRequest
from server.routes.service import AbortRequest

POSTS: dict[str, tuple[type[msgspec.Struct], Any, Any]] = {
    **{path: (e.body_type, e.reply_type, e.event_type) for path, e in ENDPOINTS.items()},
    "/tokenize": (TokenizeRequest, dict[str, Any], None),
    "/detokenize": (DetokenizeRequest, dict[str, Any], None),
    "/abort": (AbortRequest, dict[str, Any], None),
}
"""Path -> types of the body, of the whole reply, and of a streamed event (None: no stream).

The type of an event may be a union.
"""

GETS = ("/v1/models", "/health", "/live", "/ping", "/version", "/load", "/server_info", "/metrics")


@functools.cache
def describe() -> dict[str, Any]:
    """Returns the description of the API in the format of OpenAPI 3.1."""
    kinds = [ErrorBody, *(kind for post in POSTS.values() for kind in post if kind is not None)]
    types = [variant for kind in kinds for variant in _variants(kind)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    error = _content(schema_of[str(ErrorBody)])
    paths: dict[str, Any] = {
        path: {"get": {"responses": {"200": {"description": "OK"}, "default": error}}}
        for path in GETS
    }
    for path, (body, reply, event) in POSTS.items():
        success = _content(schema_of[str(reply)])
        if event is not None:
            variants = [schema_of[str(variant)] for variant in _variants(event)]
            schema = variants[0] if len(variants) == 1 else {"anyOf": variants}
            success["content"]["text/event-stream"] = {"schema": schema}
        request = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[str(body)]}},
        }
        responses = {"200": success, "default": error}
        paths[path] = {"post": {"requestBody": request, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _variants(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself. msgspec describes only tagged unions."""
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "", "content": {"application/json": {"schema": schema}}}


@functools.cache
def as_json(root_path: str) -> bytes:
    """Returns the description as JSON, with ``root_path`` as the server's URL."""
    return msgspec.json.encode({**describe(), "servers": [{"url": root_path or "/"}]})


async def openapi(request: Request) -> Response:
    """Returns the description of the API. The first call makes it, in a thread."""
    root_path = request.app.state.settings.root_path
    description = await run_in_threadpool(as_json, root_path)
    return Response(description, media_type="application/json")


routes = [Route("/openapi.json", openapi)]
