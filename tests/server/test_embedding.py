"""The application in uvicorn without the server's own HTTP protocol, and below another one."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.settings import ApiSettings
from server.state import ServerState

PROMPT = {"prompt": "hello"}


@contextlib.asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serves an application with uvicorn as it is."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", **options)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                yield client
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("place", ["root", "mounted", "root_path"])
async def test_every_layer_works_in_a_plain_host(http, place) -> None:
    settings = ApiSettings(api_key=("clé",), max_body_mib=1)
    app: Any = create_app(ServerState(scripted_text_engine("hello world")), settings)
    options: dict[str, Any] = {"http": http}
    prefix = ""
    if place == "mounted":
        app, prefix = Starlette(routes=[Mount("/sub", app)]), "/sub"
    elif place == "root_path":  # a proxy strips it from the path, uvicorn adds it again
        options["root_path"] = "/proxied"
    async with serving(app, **options) as client, asyncio.timeout(60):
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models/")).status_code == 401
        client.headers["authorization"] = "Bearer clé"  # sent as UTF-8
        path = f"{prefix}/v1/completions"
        for slash in ("", "/"):
            reply = await client.post(path + slash, json=PROMPT)
            assert reply.json()["choices"][0]["text"] == "hello world"
        streamed = await client.post(path, json=PROMPT | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        content = gzip.compress(json.dumps(PROMPT).encode())
        reply = await client.post(path, content=content, headers=headers)
        assert reply.json()["choices"][0]["text"] == "hello world"
        reply = await client.post(path, content=content[:-1], headers=headers)
        assert reply.status_code == 400
        assert "gzip" in reply.json()["error"]["message"]
        assert (await client.post(f"{prefix}/v1//completions", json=PROMPT)).status_code == 404
