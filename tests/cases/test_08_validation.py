"""Validation of the fields of requests, and the format of errors."""

import json
import math

import msgspec
import openai
import pytest

from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS

PATHS = [COMPLETIONS, CHAT]
BOTH_ENDPOINTS = pytest.mark.parametrize("path", PATHS)
TYPES = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
MAX_REPLY_BYTES = 10_000
LONG = "wide load " * 20_000


@pytest.fixture(scope="module")
def server(serve, scripted_checkpoint):
    return serve(scripted_checkpoint(ab=["A", "B", EOS]), max_body_mib=2)


def body(path, **more):
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "<ab>"}], **more}
    return {"prompt": "<ab>", **more}


def stable_parts(reply):
    """Returns the parts of a reply that the request determines."""
    (choice,) = reply["choices"]
    return choice, reply["usage"], reply["model"]


def optional_fields(path):
    fields = (field.name for field in msgspec.structs.fields(TYPES[path]))
    return [name for name in fields if name not in ("prompt", "messages")]


def fields_of(path, *types):
    """Returns the names of the fields whose type, apart from null, is one of these."""
    fields = msgspec.structs.fields(TYPES[path])
    return [field.name for field in fields if field.type in [t | None for t in types]]


@BOTH_ENDPOINTS
def test_js_110_null_means_absent(server, path) -> None:
    expected = stable_parts(server.post(path, body(path)).json())
    assert expected[0]["finish_reason"] == "stop"
    more = ["logit_bias", "tools", "tool_choice", "response_format", "user", "suffix", "metadata"]
    names = [*optional_fields(path), *more]
    assert len(names) > 40
    for nulls in (names, *([name] for name in names)):
        reply = server.post(path, body(path, **dict.fromkeys(nulls)))
        assert reply.status_code == 200, (nulls, reply.text)
        assert stable_parts(reply.json()) == expected
    if path == CHAT:
        message = {"role": "user", "content": "<ab>", "name": None, "tool_calls": None}
        assert stable_parts(server.chat([message])) == expected


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"NaN"'])
@BOTH_ENDPOINTS
def test_js_111_values_that_are_not_finite_numbers_are_refused(server, path, value) -> None:
    names = fields_of(path, float)
    assert len(names) == 6
    cases = [f'"{name}": {value}' for name in [*names, "max_tokens", "seed", "top_k"]]
    cases += [f'"logit_bias": {{"5": {value}}}', f'"logit_bias": {{"5": 1, "6": {value}}}']
    start = json.dumps(body(path))[:-1]
    for case in cases:
        error = server.refused(path, f"{start}, {case}}}")
        assert error["param"] is None or error["param"] in case.replace('": {"', "."), error


@BOTH_ENDPOINTS
def test_js_113_unknown_fields_are_ignored(server, path) -> None:
    unknown = {
        "store": True,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "port": 8000,
        "service_tier": "auto",
        "extra_body": {"temperature": -5},
        "no_such_thing": [1, {"deep": None}],
        "__class__": "x",
        "self": 1,
    }
    expected = stable_parts(server.post(path, body(path)).json())
    for more in (unknown, *({name: value} for name, value in unknown.items())):
        assert stable_parts(server.post(path, body(path, **more)).json()) == expected
    if path == CHAT:
        message = {"role": "user", "content": "<ab>", "name": "x", "mood": "good"}
        assert stable_parts(server.chat([message])) == expected
        part = {"type": "text", "text": "<ab>", "cache_control": {"type": "ephemeral"}}
        assert stable_parts(server.chat([{"role": "user", "content": [part]}])) == expected
        tool = {"type": "function", "function": {"name": "f", "strict": True, "more": 1}, "x": 2}
        assert stable_parts(server.chat("<ab>", tools=[tool], tool_choice="none")) == expected


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (CHAT, {"messages": [LONG[:40]] * 5000}),
        (CHAT, {"messages": [{"role": 5, "content": LONG[:20]}] * 5000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": {LONG: LONG}}]}),
        (CHAT, body(CHAT, tools=[{"type": LONG}] * 10)),
        (CHAT, body(CHAT, tools=[5] * 5000)),
        (CHAT, body(CHAT, tool_choice=LONG)),
        (CHAT, body(CHAT, tool_choice={"type": "function", "function": {"name": LONG}})),
        (CHAT, body(CHAT, reasoning_effort=LONG)),
        (CHAT, body(CHAT, response_format={"type": LONG})),
        (CHAT, body(CHAT, chat_template_kwargs={"messages": LONG, "tools": LONG})),
        (COMPLETIONS, {"prompt": [LONG[:40], 5] * 5000}),
        (COMPLETIONS, {"prompt": [[1], LONG]}),
        (COMPLETIONS, {"prompt": [10**9 + i for i in range(200)]}),
        (COMPLETIONS, body(COMPLETIONS, temperature=LONG)),
        (COMPLETIONS, body(COMPLETIONS, stop=[5] * 5000)),
        (COMPLETIONS, body(COMPLETIONS, stop=[LONG])),
        (COMPLETIONS, body(COMPLETIONS, stop_token_ids=[10**9 + i for i in range(256)])),
        (COMPLETIONS, body(COMPLETIONS, logit_bias={LONG: 1})),
        (COMPLETIONS, body(COMPLETIONS, logit_bias={str(10**9 + i): 1 for i in range(5000)})),
        (COMPLETIONS, body(COMPLETIONS, bad_words=[LONG])),
        (COMPLETIONS, body(COMPLETIONS, guided_regex="(" + LONG)),
        (COMPLETIONS, body(COMPLETIONS, guided_json=LONG)),
        ("/tokenize", {"prompt": {LONG: 1}}),
        ("/detokenize", {"tokens": [10**9 + i for i in range(5000)]}),
    ],
)
def test_js_119_errors_do_not_repeat_long_values(server, path, wrong) -> None:
    reply = server.post(path, wrong)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]
    assert len(reply.content) < MAX_REPLY_BYTES
    server.good_request()


def test_js_119_errors_do_not_repeat_long_names(server) -> None:
    for path in PATHS:
        reply = server.post(path, body(path, model=LONG))
        assert reply.status_code == 404
        assert len(reply.content) < MAX_REPLY_BYTES
    reply = server.http.get("/v1/" + LONG[:30_000])
    assert reply.status_code == 404
    assert len(reply.content) < MAX_REPLY_BYTES


ERRORS = [
    ({"temperature": -1}, 400, "temperature"),
    ({"model": "nobody"}, 404, "model"),
    ({"max_tokens": 10_000}, 400, "max_tokens"),
    ({"prompt": None, "messages": []}, 400, ...),
    ({"prompt": [1] * 1000, "messages": [{"role": "user", "content": "x" * 1000}]}, 400, ...),
]


@pytest.mark.parametrize(("wrong", "status", "param"), ERRORS)
@BOTH_ENDPOINTS
def test_js_120_the_official_client_can_read_errors(server, path, wrong, status, param) -> None:
    own = "messages" if path == CHAT else "prompt"
    wrong = {name: value for name, value in wrong.items() if name in (own, *optional_fields(path))}
    error = server.refused(path, body(path, **wrong), status=status)
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["param"] == (own if param is ... else param)
    kind = {400: openai.BadRequestError, 404: openai.NotFoundError}[status]
    client = server.openai()
    create = client.chat.completions.create if path == CHAT else client.completions.create
    with client, pytest.raises(kind) as caught:
        create(**{"model": "script", **body(path, **wrong)})
    assert caught.value.body == error
    assert error["message"] in caught.value.message


def test_js_120_errors_of_unknown_routes_have_the_same_format(server) -> None:
    for reply, status in (
        (server.http.get("/nowhere"), 404),
        (server.http.get(CHAT), 405),
        (server.http.delete("/v1/models"), 405),
        (server.http.get("/v1/models/nobody"), 404),
    ):
        assert reply.status_code == status
        assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["nope", " script", "script ", "SCRIPT", "script/", "../script"])
@BOTH_ENDPOINTS
def test_js_122_unknown_models_are_refused(server, path, name, stream) -> None:
    error = server.refused(path, body(path, model=name, stream=stream), status=404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert name in error["message"]


@BOTH_ENDPOINTS
def test_js_124_values_of_another_type_are_refused(server, path) -> None:
    wrong_values = {
        float: ["0.7", True, False, [1], {}, "x"],
        int: ["5", True, False, 1.5, 1e30, [], {}],
        bool: ["true", "false", 1, 0, "", [], {}],
        str: [5, True, [], {}],
    }
    cases = 0
    for kind, values in wrong_values.items():
        for name in fields_of(path, kind):
            for value in values:
                reply = server.post(path, body(path, **{name: value}))
                assert reply.status_code == 400, (name, value, reply.text)
                assert reply.json()["error"]["param"] == name
                cases += 1
    assert cases > 150
    server.good_request()


RANGES = {
    "temperature": [-1, -1e-9, -1e300],
    "top_p": [1.5, 0, -0.1, 1.0000001],
    "top_k": [-2, -(2**40)],
    "min_p": [2, -0.1],
    "presence_penalty": [10, -10, 2.1],
    "frequency_penalty": [10, -10, -2.1],
    "repetition_penalty": [0, -1],
    "n": [0, -1, 129, 10**9],
    "max_tokens": [-1, 10**9],
    "min_tokens": [-1, 10**9],
    "seed": [2**63, -(2**63) - 1],
    "prompt_logprobs": [-1, 21],
    "best_of": [2, 0],
    "truncate_prompt_tokens": [0, -2, 10**9],
    "cache_salt": ["", "x" * 2000],
    "stop_token_ids": [[-1], [512], [2**31], [2**32 + 1], [0] * 300],
    "allowed_token_ids": [[], [-1], [512], [2**32]],
    "logit_bias": [{"-1": 1}, {"512": 1}, {str(2**32): 1}],
}


@pytest.mark.parametrize("name", RANGES)
@BOTH_ENDPOINTS
def test_js_125_values_out_of_range_are_refused(server, path, name) -> None:
    for value in RANGES[name]:
        error = server.refused(path, body(path, **{name: value}))
        assert error["param"] == name, (value, error)


def test_js_125_numbers_of_logprobs_out_of_range_are_refused(server) -> None:
    for value in (-1, 21, 10**9):
        error = server.refused(COMPLETIONS, body(COMPLETIONS, logprobs=value))
        assert error["param"] == "logprobs"
        error = server.refused(CHAT, body(CHAT, logprobs=True, top_logprobs=value))
        assert error["param"] == "top_logprobs"


@BOTH_ENDPOINTS
def test_js_125_high_values_within_the_range_are_accepted(server, path) -> None:
    high = {"temperature": 3.0, "top_k": 10**9, "repetition_penalty": 1e6, "n": 4, "max_tokens": 2}
    reply = server.post(path, body(path, **high, logprobs=2 if path == COMPLETIONS else True))
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 4
    assert not any(math.isnan(x) for x in numbers_in(reply.json()))


def numbers_in(value):
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in numbers_in(item)]
    return [value] if isinstance(value, float) else []
