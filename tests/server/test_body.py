"""Bodies of requests: errors, content types, sizes and time limits."""

import asyncio
import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", PROMPT | {"temperature": -1}, 400, "temperature", None),
        ("/v1/completions", PROMPT | {"model": "no"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"prompt": [1] * 999}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": [999]}, 400, "prompt", None),
        ("/v1/completions", [], 400, None, None),
        ("/v1/completions", {}, 400, "prompt", None),
        ("/v1/chat/completions", {}, 400, "messages", None),
        ("/v1/chat/completions", CHAT | {"n": 0}, 400, "n", None),
        ("/v1/chat/completions", CHAT | {"model": "no"}, 404, "model", "model_not_found"),
        ("/v1/responses", {}, 400, "input", None),
        ("/v1/responses", {"input": "a", "model": "no"}, 404, "model", "model_not_found"),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "r"},
            400,
            "previous_response_id",
            None,
        ),
        ("/tokenize", {}, 400, "prompt", None),
        ("/tokenize", {"prompt": 5}, 400, "prompt", None),
        ("/detokenize", {}, 400, "tokens", None),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", None),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_bodies_get_an_error_even_with_stream(
    make_client, check_error, text_engine, path, body, status, param, code, stream
) -> None:
    if isinstance(body, dict) and stream:
        body = body | {"stream": True}
    async with make_client() as client:
        check_error(await client.post(path, json=body), status, param=param, code=code)
        assert text_engine.engine.submitted == []
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b'{"model":"\xff"}', b"[" * 50_000, b'{"model":NaN}'])
async def test_rejects_bodies_that_are_not_json(make_client, check_error, body) -> None:
    async with make_client() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            check_error(await client.post(path, content=body), 400)


async def test_rejects_content_types_other_than_json(make_client) -> None:
    good = json.dumps(PROMPT).encode()
    async with make_client(allowed_origins=("http://page",)) as client:

        async def status(content_type: str | None, **headers: str) -> int:
            if content_type is not None:
                headers["content-type"] = content_type
            reply = await client.post("/v1/completions", content=good, headers=headers)
            return reply.status_code

        assert await status("application/json; charset=utf-8") == 200
        assert await status("Application/JSON") == 200
        assert await status(None) == 200
        assert await status(None, origin="http://page") == 400
        assert await status("text/plain") == 400
        assert await status("application/x-www-form-urlencoded") == 400


async def test_rejects_large_bodies_with_and_without_a_declared_length(
    make_client, check_error
) -> None:
    async def chunks():
        for _ in range(40):
            yield b" " * 65536

    async with make_client(max_body_mib=1) as client:
        declared = await client.post("/v1/completions", content=b" " * (2 << 20))
        assert "1 MiB" in check_error(declared, 413)
        check_error(await client.post("/v1/completions", content=chunks()), 413)
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_a_stalled_body_times_out(make_client, check_error) -> None:
    async def trickle():
        yield b"{"
        await asyncio.Event().wait()

    async with make_client(body_timeout=0.5) as client:
        response = await client.post("/v1/completions", content=trickle())
        check_error(response, 408)
        assert response.headers["connection"] == "close"
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_bodies_with_too_much_structure_are_refused(make_client, check_error) -> None:
    async with make_client() as client:
        for value in ("[" + "[]," * 110_000 + "[]]", '"' + "\\n" * 3 * 2**20 + '"'):
            body = '{"prompt": "hello", "unknown": ' + value + "}"
            response = await client.post("/v1/completions", content=body)
            assert "--max-json-structure-mib" in check_error(response, 413)
            assert response.headers["connection"] == "close"
        text = {"prompt": "hello", "user": "[], " * 500_000}
        assert (await client.post("/v1/completions", json=text)).status_code == 200
    body = '{"prompt": "hello", "unknown": [' + "[]," * 110_000 + "[]]}"
    async with make_client(max_json_structure_mib=4) as client:
        assert (await client.post("/v1/completions", content=body)).status_code == 200


async def test_endless_numbers_are_refused(make_client, check_error) -> None:
    async with make_client() as client:
        for digits, status in ((128, 200), (129, 400), (100_000, 400)):
            body = '{"prompt": "hello", "unknown": [' + "1" * digits + "]}"
            response = await client.post("/v1/completions", content=body)
            assert response.status_code == status
        assert "128 digits" in check_error(response, 400)
