"""Middleware that runs before routing: request IDs, API keys, and protection from foreign pages."""

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
"""Paths that need no key, so that health probes work without one."""

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing and start no work."""

LOCAL_DOMAINS = (".localhost", ".local", ".internal")
"""Domains that nobody can register in the public DNS."""

_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_good_id(text: str) -> bool:
    """Returns True if a request ID is short and plain enough for headers, logs and replies."""
    return _GOOD_ID.fullmatch(text) is not None


class RequestId:
    """Puts the client's ``x-request-id`` into the request's state and the response.

    A missing ID, or one that `is_good_id` rejects, is replaced by a new one.
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


class PlainPath:
    """Serves a path with a slash at its end as the path without it.

    A redirect would lose the body, and name a host and scheme that may be those behind a proxy.

    Args:
      root_path: the path prefix that a proxy added, which is removed; "" for none. Paths without
        the prefix are served too.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        if path.endswith("/") and not path.endswith("//") and path != "/":
            path = path[:-1]
        if path != scope["path"]:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class ApiKey:
    """Refuses requests without one of the keys with 401, except those for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [
            hashlib.sha256(as_sent).digest() for key in keys for as_sent in _encodings(key)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path as it was sent, because a URL that is built from the Host header can be forged.
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
        # `Headers` decodes bytes as Latin-1, so this encodes them back.
        digest = hashlib.sha256(key.strip(" \t").encode("latin-1")).digest()
        # Compare every key in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class ForeignPages:
    """Refuses requests that a browser sends on behalf of other sites, with 403.

    A web page can send requests to any server that the browser can reach, including one that only
    listens on this machine. The browser names the site of the page in the ``Origin`` header. With
    DNS rebinding, the name of that site resolves to this server: the browser then takes both for
    the same origin, but the ``Host`` header has the name of the site. `OPEN_PATHS` are open to
    everyone.

    Args:
      hosts: names accepted in the ``Host`` header, besides those that no public site can have:
        IP addresses, names without a dot, and `LOCAL_DOMAINS`. ``*`` or None accepts any name.
      origins: origins whose pages may use methods other than `READING`; ``*`` accepts all. Pages of
        the server's own origin, and clients that are not web pages, are always accepted.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: tuple[str, ...] | None, origins: tuple[str, ...]
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._reason_to_refuse(scope)
        if reason is None:
            await self._app(scope, receive, send)
        else:
            await to_response(make_error(403, reason, type=TYPES[403]))(scope, receive, send)

    def _reason_to_refuse(self, scope: Scope) -> str | None:
        """Returns the message of the refusal, or None if the request is accepted."""
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return None
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and not self._is_allowed(_name_of(host)):
            return f"the host name {host:.100} is not allowed; add it with --allowed-hosts"
        origin = headers.get("origin")
        if (
            origin is None
            or scope["method"] in READING
            or not self._origins.isdisjoint((origin, "*"))
        ):
            return None
        # Other schemes, such as app://, belong to programs and not to pages of the web.
        scheme, _, site = origin.partition("://")
        if (scheme in ("http", "https") and site != host) or origin == "null":
            return (
                f"pages of {origin:.100} may not use this server; allow them with --allowed-origins"
            )
        return None

    def _is_allowed(self, name: str) -> bool:
        assert self._hosts is not None
        if "." not in name or name.endswith(LOCAL_DOMAINS) or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _encodings(key: str) -> list[bytes]:
    """Returns the forms in which clients send a key: UTF-8, and Latin-1 if it has these letters."""
    is_latin = all(ord(char) < 256 for char in key)
    return [key.encode("utf-8"), *([key.encode("latin-1")] if is_latin else [])]


def _name_of(host: str) -> str:
    """Returns a host header without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()
