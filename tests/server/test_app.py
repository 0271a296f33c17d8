"""The application as a client sees it: endpoints, errors and limits."""

import asyncio
import json
import re
from typing import get_args

import pytest

from jaxserve import __version__
from jaxserve.errors import EngineDeadError
from jaxserve.front.requests import GenerateRequest
from jaxserve.ipc.messages import FinishReason, RequestOutput
from jaxserve.openai.responses_protocol import Event
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.waiting import until
from server.app import ROUTES
from server.state import ServerState

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}


async def test_completions_and_chat_return_the_generated_text(make_client) -> None:
    async with make_client() as client:
        reply = (await client.post("/v1/completions", json=PROMPT)).json()
        assert reply["choices"][0]["text"] == "hello world"
        reply = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert reply["choices"][0]["message"]["content"] == "hello world"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)]
)
async def test_streams_are_server_sent_events(make_client, path, body) -> None:
    async with make_client() as client:
        response = await client.post(path, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *events, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    assert len({json.loads(event[6:])["id"] for event in events}) == 1


async def test_responses_reply_and_stream_named_events(
    make_client, check_error, text_engine
) -> None:
    async with make_client() as client:
        reply = (await client.post("/v1/responses", json={"input": "hello"})).json()
        assert reply["output"][0]["content"][0]["text"] == "hello world"
        response = await client.post("/v1/responses", json={"input": "hello", "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, rest = response.text.split("\n\n")
        assert rest == ""
        for event in events:
            name, data = event.split("\n")
            assert name == f"event: {json.loads(data[6:])['type']}"
            assert data.startswith("data: {")
        assert events[-1].startswith("event: response.completed")
        for method, path in (("GET", "r"), ("POST", "r/cancel"), ("DELETE", "r")):
            reply = await client.request(method, f"/v1/responses/{path}")
            assert "stores no responses" in check_error(reply, 404)
        text_engine.engine.fail_after = 0
        failed = await client.post("/v1/responses", json={"input": "hello", "stream": True})
        check_error(failed, 503)


async def test_errors_for_unknown_paths_and_methods_suggest_a_fix(make_client, check_error) -> None:
    async with make_client() as client:
        for path in ("/chat/completions", "/completions", "/models"):
            assert f"/v1{path}" in check_error(await client.post(path, json={}), 404)
        message = check_error(await client.get("/v1/v1/chat/completions"), 404)
        assert "did you mean /v1/chat/completions" in message
        check_error(await client.get("/nothing"), 404)
        response = await client.get("/v1/completions")
        assert "POST" in check_error(response, 405)
        assert "POST" in response.headers["allow"]


async def test_models_lists_every_served_name(make_client, check_error) -> None:
    state = ServerState(scripted_text_engine("he", names=("org/a", "b")))
    async with make_client(state=state) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["org/a", "b"]
        assert {card["max_model_len"] for card in listed["data"]} == {256}
        assert (await client.get("/v1/models/org/a")).json() == listed["data"][0]
        message = check_error(
            await client.get("/v1/models/c"), 404, param="model", code="model_not_found"
        )
        assert message.endswith(f"served here: {', '.join(card['id'] for card in listed['data'])}")
        reply = await client.post("/v1/completions", json=PROMPT | {"model": "b"})
        assert reply.json()["model"] == "b"


async def test_detokenize_reverses_tokenize(make_client, text_engine) -> None:
    async with make_client() as client:
        for prefix in ("", "/v1"):
            reply = (await client.post(f"{prefix}/tokenize", json=PROMPT)).json()
            ids = text_engine.model.tokenizer.encode("hello")
            assert reply == {
                "count": len(ids),
                "max_model_len": 256,
                "tokens": ids,
                "token_strs": None,
            }
            back = await client.post(f"{prefix}/detokenize", json={"tokens": ids})
            assert back.json() == {"prompt": "hello"}
        reply = await client.post("/tokenize", json=CHAT | {"return_token_strs": True})
        assert "".join(reply.json()["token_strs"]).endswith("<|im_start|>assistant\n")
        without = await client.post("/tokenize", json=CHAT | {"add_generation_prompt": False})
        assert without.json()["count"] < reply.json()["count"]


async def test_version_probes_and_load_respond(make_client, text_engine) -> None:
    async with make_client() as client:
        assert (await client.get("/version")).json() == {"version": __version__}
        for method, path in (("GET", "/health"), ("GET", "/live"), ("POST", "/ping")):
            response = await client.request(method, path)
            assert (response.status_code, response.content) == (200, b"")
        assert (await client.get("/load")).json() == {"server_load": 0}
        deltas = text_engine.generate(GenerateRequest(prompts=[[1]], params=SamplingParams(n=3)))
        await anext(deltas)
        assert (await client.get("/load")).json() == {"server_load": 3}
        await deltas.aclose()


async def test_requests_get_a_503_before_the_server_is_ready_and_while_it_drains(
    make_client, check_error, text_engine, caplog
) -> None:
    state = ServerState()
    state.phase = "load weights"
    async with make_client(state=state) as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        response = await client.get("/health")
        assert "load weights" in check_error(response, 503)
        assert "retry-after" in response.headers
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            check_error(await client.post(path, json=PROMPT), 503)
        check_error(await client.get("/v1/models"), 503)
        assert not caplog.records, "a refused request is no failure"
        state.text_engine = text_engine
        assert (await client.get("/health")).status_code == 200
        state.draining = True
        check_error(await client.get("/health"), 503)
        check_error(await client.post("/v1/completions", json=PROMPT), 503)
        assert (await client.get("/live")).status_code == 200


@pytest.mark.parametrize("n", [1, 2])
async def test_a_dead_engine_causes_a_503_or_an_error_in_the_stream(
    make_client, check_error, text_engine, n
) -> None:
    streamed = PROMPT | {"stream": True, "n": n}
    async with make_client() as client:
        text_engine.engine.fail_after = 0
        check_error(await client.post("/v1/completions", json=streamed), 503)
        check_error(await client.post("/v1/completions", json=PROMPT), 503)
        text_engine.engine.fail_after = 2
        check_error(await client.post("/v1/completions", json=PROMPT), 503)
        response = await client.post("/v1/completions", json=streamed)
        assert response.status_code == 200
        *chunks, error, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(error[6:])["error"]["code"] == 503
        assert '"finish_reason":"stop"' not in response.text
        assert len(chunks) >= 1
        text_engine.engine.fail_after = None
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
        text_engine.engine.error = EngineDeadError("gone")
        check_error(await client.get("/health"), 503)


async def test_an_unexpected_error_is_a_500_without_details(
    make_client, check_error, text_engine, caplog
) -> None:
    text_engine.engine.fail_after = 0
    text_engine.engine.error = ValueError("secret")
    async with make_client() as client:
        for body in (PROMPT, PROMPT | {"stream": True}):
            message = check_error(await client.post("/v1/completions", json=body), 500)
            assert message == "Internal server error"
    assert "secret" in caplog.text


async def test_a_request_above_the_admission_limit_gets_a_429_with_retry_after(
    make_client, check_error
) -> None:
    text_engine = scripted_text_engine("hello", max_in_flight=1)
    held = text_engine.generate(GenerateRequest(prompts=[[1]], params=SamplingParams()))
    await anext(held)
    async with make_client(state=ServerState(text_engine)) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        check_error(response, 429, code="queue_full")
        assert response.headers["retry-after"] == "1"
        await held.aclose()
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_abort_ends_requests_by_id(make_client, check_error, text_engine) -> None:
    text_engine.engine.stall_after = 1
    async with make_client() as client:
        selectors = ({"request_id": "abc"}, {"request_id": "cmpl-abc"}, {"abort_all": True})
        for i, selector in enumerate(selectors, 1):
            pending = asyncio.create_task(
                client.post("/v1/completions", json=PROMPT | {"n": 2, "request_id": "abc"})
            )
            await until(lambda i=i: text_engine.metrics.generation_tokens == 2 * i)
            assert (await client.post("/abort", json={"request_id": "no"})).json() == {"aborted": 0}
            assert (await client.post("/abort", json=selector)).json() == {"aborted": 2}
            reply = (await pending).json()
            assert {c["finish_reason"] for c in reply["choices"]} == {"abort"}
            assert {c["text"] for c in reply["choices"]} == {"hello"}
        for bad in ({}, {"request_id": "a", "abort_all": True}):
            check_error(await client.post("/abort", json=bad), 400, param="request_id")


async def test_server_info_shows_models_and_engines_but_no_key(make_client, text_engine) -> None:
    async with make_client(api_key=("secret",)) as client:
        assert (await client.get("/server_info")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        reply = await client.get("/server_info", headers=headers)
    assert "secret" not in reply.text
    info = reply.json()
    assert info["models"] == ["tiny"]
    assert info["max_model_len"] == 256
    assert info["engines"]["0"]["num_running"] == 0


async def test_openapi_describes_existing_routes(make_client) -> None:
    async with make_client(root_path="/llm") as client:
        page = (await client.get("/openapi.json")).json()
        assert page["servers"] == [{"url": "/llm"}]
        paths = {route.path for route in ROUTES}
        assert page["paths"].keys() <= paths
        components = page["components"]["schemas"]
        references = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(page))
        assert set(references) <= components.keys()
        assert components["CompletionRequest"]["properties"].keys() >= {"prompt", "logit_bias"}
        responses = page["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
        assert len(responses["text/event-stream"]["schema"]["anyOf"]) == len(get_args(Event))
        for path, methods in page["paths"].items():
            if "get" in methods:
                assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_reason_of_the_engine_reaches_the_client(
    text_engine, make_client, check_error, stream
) -> None:
    async def failing(submit, **_):
        yield RequestOutput(submit.request_id, text_engine.model.tokenizer.encode("hello"))
        yield RequestOutput(submit.request_id, [], FinishReason.ERROR, error="its grammar is lost")

    text_engine.engine.generate = failing
    async with make_client() as client:
        body = {"prompt": "a", "stream": stream}
        response = await client.post("/v1/completions", json=body)
    if stream:
        (event,) = [line for line in response.text.splitlines() if '"error"' in line]
        assert "its grammar is lost" in event
    else:
        assert check_error(response, 500) == "its grammar is lost"
