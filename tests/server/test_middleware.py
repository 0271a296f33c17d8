"""What runs before an endpoint: request IDs, keys, CORS and the root path."""

import asyncio
import re

import pytest

from jaxserve.errors import ConfigError
from server.settings import ApiSettings

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}


async def test_a_missing_key_returns_a_standard_error(make_client, check_error) -> None:
    async with make_client(api_key=("one",)) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        message = check_error(response, 401, code="invalid_api_key")
        assert "one" not in message.replace("one of", "")
        forged = {"host": "x/health?"}
        assert (await client.get("/v1/models", headers=forged)).status_code == 401


async def test_only_allowed_origins_get_cors_headers(make_client, text_engine) -> None:
    preflight = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    async with make_client(api_key=("k",), allowed_origins=("http://page",)) as client:
        response = await client.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page"
        assert "x-stainless-os" in response.headers["access-control-allow-headers"]
        headers = {"origin": "http://page", "authorization": "Bearer k"}
        text_engine.engine.fail_after = 0
        text_engine.engine.error = ValueError("defect")
        for body in (PROMPT, PROMPT | {"n": 0}, PROMPT | {"stream": True}):
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.headers["access-control-allow-origin"] == "http://page"
        response = await client.get("/v1/models", headers={"origin": "http://page"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "http://page"
        other = await client.get("/health", headers={"origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers
    async with make_client() as client:
        response = await client.get("/health", headers={"origin": "http://page"})
        assert "access-control-allow-origin" not in response.headers


async def test_request_ids_are_echoed_or_generated(make_client) -> None:
    async with make_client() as client:
        for path, body in (("/v1/completions", PROMPT), ("/v1/completions", {}), ("/x", {})):
            response = await client.post(path, json=body, headers={"x-request-id": "abc-1"})
            assert response.headers["x-request-id"] == "abc-1"
        for bad in ("", "a b", "x" * 200, "a\tb", "é"):
            response = await client.post(
                "/v1/completions", json=PROMPT, headers={"x-request-id": bad.encode()}
            )
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
        streamed = await client.post(
            "/v1/completions",
            json=PROMPT | {"stream": True},
            headers={"x-request-id": "abc-1"},
        )
        assert streamed.headers["x-request-id"] == "abc-1"
        assert '"id":"cmpl-abc-1"' in streamed.text


async def test_the_body_may_contain_the_request_id(make_client) -> None:
    async with make_client() as client:
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            reply = await client.post(path, json=body | {"request_id": "abc-1"})
            assert reply.headers["x-request-id"] == "abc-1"
            assert reply.json()["id"].endswith("-abc-1")
            other = {"x-request-id": "other"}
            reply = await client.post(path, json=body | {"request_id": "abc-1"}, headers=other)
            assert reply.headers["x-request-id"] == "other"
            reply = await client.post(path, json=body | {"request_id": "a b"})
            assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


async def test_root_path_serves_every_route_under_a_prefix(make_client, check_error) -> None:
    async with make_client(root_path="/llm", api_key=("k",)) as client:
        key = {"authorization": "Bearer k"}
        for path in ("/v1/models", "/llm/v1/models"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=key)).json()["data"][0]["id"] == "tiny"
        assert (await client.get("/llm/health")).status_code == 200
        check_error(await client.get("/llmx/v1/models", headers=key), 404)
    for bad in ("llm", "/llm/", "/"):
        with pytest.raises(ConfigError):
            ApiSettings(root_path=bad)


async def test_two_requests_may_have_the_same_id(make_client, text_engine) -> None:
    async with make_client() as client:
        replies = await asyncio.gather(
            *(
                client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "same"})
                for _ in range(3)
            )
        )
    assert [r.json()["choices"][0]["text"] for r in replies] == ["hello world"] * 3
    assert len({s.request_id for s in text_engine.engine.submitted}) == 3
