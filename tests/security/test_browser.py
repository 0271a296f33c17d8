"""Pages of other sites cannot use a server that listens on the visitor's own machine.

CVE-2024-28224 (DNS rebinding), CVE-2026-27482 (an HTTP method that a check missed), CVE-2025-62593.
"""

import httpx
import pytest

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import ROUTES, create_app
from server.listen import is_local, listen
from server.settings import ApiSettings
from server.state import ServerState

BODY = {"prompt": "hello"}
PATHS = sorted({route.path.replace("{name:path}", "tiny") for route in ROUTES})
OPEN_PATHS = {"/health", "/live"}
ANY_METHOD = ["POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "BREW"]

LOOPBACK_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "[::1]",
]
LOCAL_HOSTS = [
    "my-pc",
    "my-pc:80",
    "gpu.local",
    "host.docker.internal:8000",
    "a.localhost",
    "10.1.2.3:8",
]
FOREIGN_HOSTS = [
    *(
        "evil.example",
        "evil.example:8000",
        "evil.example.",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
    ),
    *(
        "evil.example:localhost",
        "internal.evil.example",
        "x.local.evil.example",
        "2130706433.x",
    ),
]


def make_client(*, is_local=True, **settings):
    app = create_app(
        ServerState(scripted_text_engine("hello world")), ApiSettings(**settings), is_local=is_local
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_rejects_foreign_host_names(host) -> None:
    async with make_client() as client:
        for path in PATHS:
            for method in ("GET", "HEAD", "OPTIONS", *ANY_METHOD):
                reply = await client.request(method, path, headers={"host": host})
                assert (reply.status_code == 403) == (path not in OPEN_PATHS), (method, path)
        # To the browser, a page of this host has the same origin as the server.
        headers = {"host": host, "origin": f"http://{host}"}
        reply = await client.post("/v1/completions", json=BODY, headers=headers)
        assert reply.status_code == 403
        assert "--allowed-hosts" in reply.json()["error"]["message"]


@pytest.mark.parametrize("host", [*LOOPBACK_HOSTS, *LOCAL_HOSTS])
async def test_accepts_host_names_that_no_site_can_have(host) -> None:
    async with make_client() as client:
        reply = await client.post("/v1/completions", json=BODY, headers={"host": host})
        assert reply.status_code == 200
        page = {"host": host, "origin": f"http://{host}"}
        reply = await client.post("/v1/completions", json=BODY, headers=page)
        assert reply.status_code == 200


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS, *LOOPBACK_HOSTS, *LOCAL_HOSTS])
async def test_a_network_server_accepts_any_host_unless_hosts_are_listed(host) -> None:
    async with make_client(is_local=False) as client:
        reply = await client.post("/v1/completions", json=BODY, headers={"host": host})
        assert reply.status_code == 200
    async with make_client(is_local=False, allowed_hosts=("llm.example",)) as client:
        reply = await client.post("/v1/completions", json=BODY, headers={"host": host})
        assert reply.status_code == (403 if host in FOREIGN_HOSTS else 200)
        headers = {"host": "LLM.example:443"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_foreign_hosts_are_accepted_if_listed_or_with_a_key() -> None:
    host = {"host": "llm.example"}
    for allowed in (("llm.example",), ("other", "*")):
        async with make_client(allowed_hosts=allowed) as client:
            assert (await client.get("/v1/models", headers=host)).status_code == 200
    async with make_client(api_key=("k",)) as client:  # unknown to pages of other sites
        assert (await client.get("/v1/models", headers=host)).status_code == 401
        headers = host | {"authorization": "Bearer k", "origin": "https://page.example"}
        assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    async with make_client(api_key=("k",), allowed_hosts=("other.example",)) as client:
        headers = host | {"authorization": "Bearer k"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 403


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://evil.example",
        "null",
        "http://127.0.0.1:9000",
        "https://127.0.0.1",
    ],
)
async def test_pages_of_other_origins_may_only_read(origin, is_local) -> None:
    """The server lists the methods that it allows, so unknown methods are refused too."""
    headers = {"origin": origin}
    async with make_client(is_local=is_local) as client:
        for path in PATHS:
            for method in ANY_METHOD:
                reply = await client.request(method, path, headers=headers)
                assert (reply.status_code == 403) == (path not in OPEN_PATHS), (method, path)
        reply = await client.get("/v1/models", headers=headers)
        assert reply.status_code == 200
        assert "access-control-allow-origin" not in reply.headers, "the page can read the reply"
        reply = await client.post("/v1/completions", json=BODY, headers=headers)
        assert "--allowed-origins" in reply.json()["error"]["message"]
    async with make_client(is_local=is_local, allowed_origins=(origin,)) as client:
        reply = await client.post("/v1/completions", json=BODY, headers=headers)
        assert reply.status_code == 200
        other = {"origin": "https://other.example"}
        reply = await client.post("/v1/completions", json=BODY, headers=other)
        assert reply.status_code == 403
    async with make_client(is_local=is_local, allowed_origins=("*",)) as client:
        reply = await client.post("/v1/completions", json=BODY, headers=headers)
        assert reply.status_code == 200


@pytest.mark.parametrize("origin", ["app://notes", "vscode-webview://1234", "tauri://localhost"])
async def test_accepts_origins_of_local_programs(origin) -> None:
    async with make_client() as client:
        reply = await client.post("/v1/completions", json=BODY, headers={"origin": origin})
        assert reply.status_code == 200


async def test_rejects_content_types_that_need_no_preflight() -> None:
    """A page can send only these content types, or none, without a preflight."""
    async with make_client(is_local=False, allowed_origins=("https://page.example",)) as client:
        for kind in (
            *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None),
        ):
            headers = {"origin": "https://page.example"} | ({"content-type": kind} if kind else {})
            for path in PATHS:
                reply = await client.post(path, content=b'{"prompt":"a"}', headers=headers)
                assert reply.status_code in (400, 404, 405) or path == "/ping", (kind, path)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_only_loopback_addresses_are_local(host, expected) -> None:
    listeners = listen(host, 0)
    assert is_local(listeners) == expected
    for listener in listeners:
        listener.close()
