"""With an API key, only the probes are open, whatever the method and the spelling of the path.

CVE-2025-59425 (the time to compare keys reveals them), CVE-2026-48710 (paths taken from Host).
"""

import ast
import inspect
import socket

import httpx
import pytest

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from server import middleware
from server.app import ROUTES, create_app
from server.settings import ApiSettings
from server.state import ServerState
from server.testing import ServerThread, flags

KEY = "a-very-secret-key"
OPEN_PATHS = {"/health", "/live"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"]
PATHS = sorted({route.path.replace("{name:path}", "tiny") for route in ROUTES})
OTHER_PATHS = [
    "/",
    "",
    "/docs",
    "/redoc",
    "/static/x",
    "/v1",
    "/v1/",
    "/favicon.ico",
    "/admin",
    "/llm",
]


@pytest.mark.parametrize("root_path", ["", "/llm"])
@pytest.mark.parametrize("method", METHODS)
async def test_every_path_with_every_method_needs_the_key(method, root_path) -> None:
    settings = ApiSettings(api_key=(KEY,), root_path=root_path)
    app = create_app(ServerState(scripted_text_engine("hi")), settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in [*PATHS, *OTHER_PATHS, *(root_path + path for path in PATHS)]:
            for form in (path, path + "/", path + "//", "/" + path):
                reply = await client.request(method, "http://test" + form)
                is_open = form.removeprefix(root_path) in OPEN_PATHS
                assert (reply.status_code == 401) != is_open, (form, reply.status_code)
    assert {route.path for route in ROUTES} >= OPEN_PATHS, "no open path was tried"


@pytest.mark.parametrize("path", PATHS)
async def test_any_of_the_keys_opens_every_path_and_nothing_else_does(path) -> None:
    app = create_app(ServerState(scripted_text_engine("hi")), ApiSettings(api_key=("one", "two")))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    wrong = ["Bearer three", "Bearer ", "Basic one", "one", "Bearer one two", "Bearer on", ""]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for header in wrong:
            reply = await client.get(path, headers={"authorization": header})
            assert reply.status_code == (200 if path in OPEN_PATHS else 401), header
        for header in ("Bearer one", "bearer two", "BEARER  one"):
            reply = await client.get(path, headers={"authorization": header})
            assert reply.status_code != 401, header


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("auth") / "model", tiny_config())
    factory = "jaxserve.testing.fake_engine:build"
    server = ServerThread(*flags(model=folder, api_key=KEY, engine_factory=factory))
    url = httpx.URL(server.url)
    yield url.host, url.port
    server.close()


TARGETS = [
    *(
        "//health",
        "///live",
        "/health/",
        "/health//",
        "/./health",
        "/health/.",
        "/health/../v1/models",
    ),
    *("/v1/../health", "/%68ealth/x", "/health%2f", "/health%2e", "/%2e%2e/health", "/health%00"),
    *("/health%0a", "/HEALTH", "/health;x", "/health;/v1/models", "/v1/models;/health"),
    *("/v1/models%3f/health", "/v1/models?path=/health", "/v1/models#/health", "/health%23/v1"),
    *("/health\\..\\v1\\models", "/\\health", "*", "health", "x:/health", "http:///v1/models"),
    *("http://x/v1/models", "http://x/health/../v1/models", "http://health/v1/models"),
    *(
        "https://x@y/health:80/v1/models",
        "//x/health/v1/models",
        "/v1/models/health",
        "/live/health",
    ),
]
HOSTS = ["x", "x/health", "x/health?", "x/health#", "127.0.0.1", "health", "[::1]/live", "x:1/live"]


def fetch(address, head: str) -> bytes:
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head.encode("latin-1"))
        reply = b""
        while data := connection.recv(65536):
            reply += data
    return reply


@pytest.mark.parametrize("target", TARGETS)
def test_no_spelling_of_a_path_bypasses_the_key(address, target) -> None:
    for host in HOSTS if "models" in target else HOSTS[:2]:
        reply = fetch(
            address, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )
        assert reply.split(b" ", 2)[1] in (b"400", b"401"), reply[:200]
        assert b'"object":"list"' not in reply


@pytest.mark.parametrize(
    "header",
    [
        *("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health"),
        *("X-HTTP-Method-Override: OPTIONS", "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"),
        *("X-Forwarded-Host: localhost", "Forwarded: for=127.0.0.1", "X-Api-Key: " + KEY),
        *("Authorization: Bearer x\r\nAuthorization: Bearer " + KEY, "Cookie: key=" + KEY),
        *("Authorization: Basic " + KEY, f"Authorization: Bearer {KEY} x", "Authorization: " + KEY),
        *("Proxy-Authorization: Bearer " + KEY, "Authorization : Bearer " + KEY),
    ],
)
def test_no_other_header_grants_access(address, header) -> None:
    line = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    reply = fetch(address, f"{line}{header}\r\n\r\n")
    assert reply.split(b" ", 2)[1] in (b"400", b"401"), reply[:200]
    assert KEY.encode() not in reply
    good = fetch(address, f"{line}Authorization: Bearer {KEY}\r\n\r\n")
    assert good.startswith(b"HTTP/1.1 200 ")


def test_keys_are_compared_in_constant_time() -> None:
    """Only `hmac.compare_digest` compares the digests of keys."""
    tree = ast.parse(inspect.getsource(middleware))
    (known,) = [
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_is_known"
    ]
    compared = [ast.unparse(n.func) for n in ast.walk(known) if isinstance(n, ast.Call)]
    assert "hmac.compare_digest" in compared
    for node in ast.walk(known):
        if isinstance(node, ast.Compare):
            assert "digest" not in ast.unparse(node)
            assert "key" not in ast.unparse(node)
