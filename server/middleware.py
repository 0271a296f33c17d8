"""What happens to every request before it is routed: it gets an id, and its key is looked at."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.openai.errors import make_error
from server.errors import TYPES, to_response

OPEN_PATHS = frozenset({"/health", "/live"})
"""What can be asked without a key, so that probes need none."""

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing and start no work."""

LOCAL_DOMAINS = (".localhost", ".local", ".internal")
"""Domains in which nobody can have a name for the whole world."""

_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_good_id(text: str) -> bool:
    """Whether a request id is short and plain, so that it can be written anywhere."""
    return _GOOD_ID.fullmatch(text) is not None


class RequestId:
    """Puts the client's ``x-request-id``, or a new one, into the request's state and the reply.

    One that is long or has odd characters is replaced, so that it can be written anywhere.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        is_good = is_good_id(given)
        state = scope.setdefault("state", {})
        state["request_id"] = given if is_good else uuid.uuid4().hex
        state["has_own_id"] = is_good

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        await self._app(scope, receive, send_with_id)


class RootPath:
    """Takes off the path that a proxy has put in front of ours and did not take off itself."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(self._root_path + "/"):
            scope = {**scope, "path": path[len(self._root_path) :]}
        await self._app(scope, receive, send)


class ApiKey:
    """Lets a request through if it carries one of the keys, or asks for an open path."""

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path as it was sent; a URL put together from the Host header can be forged.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS or self._is_known(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        reply = make_error(
            401,
            "send one of the server's API keys as 'Authorization: Bearer KEY'",
            type=TYPES[401],
            code="invalid_api_key",
        )
        await to_response(reply, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # Every key is compared, and in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class ForeignPages:
    """Refuses what the pages of other sites make a browser send.

    A page can send requests to any server that the browser reaches, so also to one that listens
    to this machine only. The browser says which page it is for in ``origin``. If the page's own
    name is made to lead here (DNS rebinding) it is no stranger to the browser, but ``host`` has
    that name. `OPEN_PATHS` are open to all.

    Args:
      hosts: names under which the server may be asked, besides those that no site can have:
        addresses, names without a dot, and `LOCAL_DOMAINS`. ``*`` or None: under any.
      origins: of pages that may do more than read; ``*``: all. That of the server itself always
        may, and so may what is no page of the web.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: tuple[str, ...] | None, origins: tuple[str, ...]
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._objection(scope)
        if why is None:
            await self._app(scope, receive, send)
        else:
            await to_response(make_error(403, why, type=TYPES[403]))(scope, receive, send)

    def _objection(self, scope: Scope) -> str | None:
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return None
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and not self._is_ours(_name_of(host)):
            return f"the server is not known as {host:.100}; it may be with --allowed-hosts"
        origin = headers.get("origin")
        if (
            origin is None
            or scope["method"] in READING
            or not self._origins.isdisjoint((origin, "*"))
        ):
            return None
        scheme, _, site = origin.partition("://")
        if (scheme in ("http", "https") and site != host) or origin == "null":
            return (
                f"pages of {origin:.100} may not use this server; they may with --allowed-origins"
            )
        return None

    def _is_ours(self, name: str) -> bool:
        assert self._hosts is not None
        if "." not in name or name.endswith(LOCAL_DOMAINS) or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name_of(host: str) -> str:
    """A host header without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()
