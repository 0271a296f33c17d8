"""The front: connections, CORS, API keys, model names, proxies and model paths."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jaxserve.config import ModelConfig
from jaxserve.front.served_model import ModelFiles
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.tiny import write_checkpoint
from server.app import ROUTES

KEY = "a-very-secret-key"
ROUTES_WITHOUT_KEY = {"/health", "/live"}
ORIGIN = "https://app.example"
BODY = {"prompt": [1, 2], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    return serve(random_checkpoint)


@pytest.fixture(scope="module")
def server_with_key(serve, random_checkpoint):
    return serve(random_checkpoint, api_key=(KEY, "another"), allowed_origins=(ORIGIN,))


def test_js_184_idle_connections_stay_open_for_a_minute(server) -> None:
    connections = server.thread._http.server_state.connections

    async def idle_times():
        now = asyncio.get_running_loop().time()
        timers = [connection.timeout_keep_alive_task for connection in connections]
        return [timer.when() - now for timer in timers if timer is not None]

    server.good_request()
    times = server.thread.call(idle_times())
    assert times
    assert min(times) > 60


def test_js_184_a_connection_stays_open_until_the_idle_timeout(serve, random_checkpoint) -> None:
    url = httpx.URL(serve(random_checkpoint, keep_alive_timeout=1).url)
    request = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200 ")
        assert connection.recv(1) == b""


def test_js_185_browsers_may_send_preflight_requests(server_with_key) -> None:
    preflight_headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    for path in (CHAT, COMPLETIONS, "/v1/models"):
        preflight = server_with_key.http.options(path, headers=preflight_headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in preflight.headers["access-control-allow-methods"]
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert "authorization" in allowed
        assert "x-stainless-lang" in allowed
    key = {"Authorization": f"Bearer {KEY}"}
    for headers, body, status in (
        ({}, BODY, 401),
        (key, BODY, 200),
        (key, {**BODY, "stream": True}, 200),
        (key, {**BODY, "temperature": -1}, 400),
        (key, {**BODY, "model": "nobody"}, 404),
    ):
        reply = server_with_key.http.post(
            COMPLETIONS, json=body, headers={"Origin": ORIGIN, **headers}
        )
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        assert reply.headers["x-request-id"]
    other_origin = {**preflight_headers, "Origin": "https://evil.example"}
    assert (
        "access-control-allow-origin"
        not in server_with_key.http.options(CHAT, headers=other_origin).headers
    )


def test_js_185_other_origins_are_not_allowed_by_default(server) -> None:
    reply = server.http.post(COMPLETIONS, json=BODY, headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in reply.headers


def methods_and_paths():
    """Returns each route with each of its methods."""
    return sorted(
        (method, route.path.replace("{name:path}", "x"))
        for route in ROUTES
        for method in route.methods - {"HEAD"}
    )


@pytest.mark.parametrize(("method", "path"), methods_and_paths())
def test_js_186_every_route_needs_the_key(server_with_key, caplog, method, path) -> None:
    assert len(methods_and_paths()) > 12
    for authorization in (None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", f"Bearer {KEY}x"):
        headers = {} if authorization is None else {"Authorization": authorization}
        reply = server_with_key.http.request(method, path, headers=headers)
        assert (reply.status_code == 401) == (path not in ROUTES_WITHOUT_KEY)
        assert KEY not in reply.text
        if path not in ROUTES_WITHOUT_KEY:
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
    for authorization in (f"Bearer {KEY}", f"bearer {KEY}", "Bearer another", f"Bearer  {KEY}"):
        reply = server_with_key.http.request(method, path, headers={"Authorization": authorization})
        assert reply.status_code != 401
        assert KEY not in reply.text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "target",
    [
        *(
            "/nowhere",
            "/v1/models/../../health",
            "/health/../v1/models",
            "//v1/models",
            "/v1/models/",
        ),
        *("/v1/models?/health", "/v1/models#/health", "/health%2f..%2fv1%2fmodels", "/Health"),
        *("/health/", "http://x/v1/models", "/v1/models;/health", "/docs", "/openapi.json"),
    ],
)
def test_js_186_odd_targets_do_not_bypass_the_key(server_with_key, target) -> None:
    url = httpx.URL(server_with_key.url)
    for host in ("x", "x/health?", "x/health#"):
        request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        with socket.create_connection((url.host, url.port), timeout=60) as connection:
            connection.sendall(request.encode())
            status = connection.recv(10_000).split(b" ", 2)[1]
        assert status in (b"401", b"400")


def test_js_188_the_model_is_served_under_every_name(serve, random_checkpoint) -> None:
    server = serve(random_checkpoint, served_model_name=("a", "org/b"))
    for path, body in (
        (COMPLETIONS, BODY),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ):
        for name in ("a", "org/b"):
            reply = server.post(path, {**body, "model": name})
            assert reply.json()["model"] == name
            streamed = server.stream(path, {**body, "model": name})
            assert {chunk["model"] for chunk in streamed.chunks} == {name}
        for name in (str(random_checkpoint), random_checkpoint.name, "b", "org", "org/b/", "A"):
            assert name in server.refused(path, {**body, "model": name}, status=404)["message"]
    cards = server.http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["a", "org/b"]
    assert {card["max_model_len"] for card in cards["data"]} == {256}
    for card in cards["data"]:
        assert server.http.get(f"/v1/models/{card['id']}").json() == card
    assert server.http.get("/v1/models/").json() == cards
    for name in ("c", "org", random_checkpoint.name):
        assert server.http.get(f"/v1/models/{name}").status_code in (404, 405)


def test_js_189_a_request_without_a_model_gets_the_first_name(serve, random_checkpoint) -> None:
    server = serve(random_checkpoint, served_model_name=("a", "org/b"))
    for path, body in (
        (COMPLETIONS, BODY),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ):
        for more in ({}, {"model": None}, {"model": ""}):
            reply = server.post(path, {**body, **more})
            assert reply.status_code == 200
            assert reply.json()["model"] == "a"
            streamed = server.stream(path, {**body, **more})
            assert {chunk["model"] for chunk in streamed.chunks} == {"a"}
        for name in (" a", "a ", " ", "A", "a\n"):
            server.refused(path, {**body, "model": name}, status=404)
        for wrong in (5, ["a"], True, {}):
            assert server.refused(path, {**body, "model": wrong})["param"] == "model"


def test_js_190_routes_also_work_below_the_root_path(serve, random_checkpoint) -> None:
    server = serve(random_checkpoint, root_path="/llm")
    plain = server.http.get("/v1/models").json()
    assert server.http.get("/llm/v1/models").json() == plain
    assert server.http.get("/llm/health").status_code == 200
    assert server.post("/llm" + COMPLETIONS, BODY).json()["object"] == "text_completion"
    assert server.stream("/llm" + COMPLETIONS, BODY).done
    for path in ("/llm/llm/v1/models", "/llmx/v1/models", "/other/v1/models"):
        reply = server.http.get(path)
        assert reply.status_code == 404
        assert "/v1" in reply.json()["error"]["message"]
    with server.openai(base_url=f"{server.url}/llm/v1") as client:
        assert [model.id for model in client.models.list()] == [random_checkpoint.name]


def test_js_190_routes_below_the_root_path_need_the_key(serve, random_checkpoint) -> None:
    server = serve(random_checkpoint, root_path="/llm", api_key=KEY)
    for path, status in (("/llm/v1/models", 401), ("/v1/models", 401), ("/llm/health", 200)):
        assert server.http.get(path).status_code == status
        reply = server.http.get(path, headers={"Authorization": f"Bearer {KEY}"})
        assert reply.status_code == 200


OPEN_WITHOUT_NETWORK = """
import socket, sys

def refuse(self, address):
    if self.family != socket.AF_UNIX:
        print("CONNECTS", address)
        raise OSError("there is no network")

socket.socket.connect = socket.socket.connect_ex = refuse
from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.front.served_model import ModelFiles

for model, _, tokenizer in (arg.partition(",") for arg in sys.argv[1:]):
    try:
        served = ModelFiles.open(ModelConfig(model=model, tokenizer=tokenizer or None))
        shapes = [tensor.shape for _, tensor in open_checkpoint(model).tensors()]
        print("OPENED", served.name, served.tokenizer.vocab_size, len(shapes))
    except CheckpointError as error:
        print("REFUSED", error)
"""


def copy_to_hub_cache(home: Path, source: Path, name: str, *, only: str = "") -> None:
    """Copies a checkpoint into the cache of the hub, in the layout of its client."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    for directory in (folder / "blobs", folder / "refs", snapshot):
        directory.mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    for file in source.glob(f"{only}*"):
        (folder / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(folder / "blobs" / file.name)


def test_js_192_cached_models_are_opened_without_a_network(random_checkpoint, tmp_path) -> None:
    copy_to_hub_cache(tmp_path, random_checkpoint, "org/name")
    other = write_checkpoint(tmp_path / "other")
    copy_to_hub_cache(tmp_path, other, "org/tokenizer", only="tokenizer")
    models = [
        str(random_checkpoint),
        "org/name",
        f"{random_checkpoint},org/tokenizer",
        "org/name,org/tokenizer",
    ]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", OPEN_WITHOUT_NETWORK, *models, "org/missing", "org/tokenizer"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    *opened, missing, incomplete = result.stdout.splitlines()
    full_size = ModelFiles.open(ModelConfig(model=str(random_checkpoint))).tokenizer.vocab_size
    small_size = ModelFiles.open(ModelConfig(model=str(other))).tokenizer.vocab_size
    assert small_size < full_size
    num_tensors = 2 * 9 + 3
    assert opened == [
        f"OPENED rand {full_size} {num_tensors}",
        f"OPENED org/name {full_size} {num_tensors}",
        f"OPENED rand {small_size} {num_tensors}",
        f"OPENED org/name {small_size} {num_tensors}",
    ]
    assert missing.startswith("REFUSED")
    assert "org/missing" in missing
    assert incomplete.startswith("REFUSED")


def test_js_193_a_path_may_be_written_in_any_form(random_checkpoint, tmp_path, monkeypatch) -> None:
    spaced = tmp_path / "my ckpt.v1"
    spaced.symlink_to(random_checkpoint)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(random_checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model, name in (
        *((form, "my ckpt.v1") for form in ("my ckpt.v1", "./my ckpt.v1/", f"{spaced}///")),
        *((form, "my ckpt.v1") for form in ("~/my ckpt.v1", "~/my ckpt.v1/", "org/../my ckpt.v1")),
        *((form, "name") for form in ("org/name", "./org/name/", f"{tmp_path}/org/name")),
    ):
        assert ModelFiles.open(ModelConfig(model=model)).name == name, model
    monkeypatch.chdir(random_checkpoint)
    assert ModelFiles.open(ModelConfig(model=".")).name == random_checkpoint.name


def test_js_193_a_model_is_served_under_the_last_part_of_its_path(
    serve, random_checkpoint, tmp_path, monkeypatch
) -> None:
    (tmp_path / "my ckpt.v1").symlink_to(random_checkpoint)
    monkeypatch.chdir(tmp_path)
    server = serve("./my ckpt.v1/")
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["my ckpt.v1"]
    assert server.complete([1, 2], max_tokens=1, model="my ckpt.v1")["model"] == "my ckpt.v1"
    assert server.http.get("/v1/models/my%20ckpt.v1").json()["id"] == "my ckpt.v1"
