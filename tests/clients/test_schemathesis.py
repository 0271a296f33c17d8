"""Requests that schemathesis generates from the OpenAPI description of the server."""

import random

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.routes.openapi import POSTS, describe
from server.settings import ApiSettings
from server.state import ServerState

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> <think> #}"
GOOD_BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/abort": {"request_id": "x"},
}
NUM_EXAMPLES = {GenerationMode.POSITIVE: 10, GenerationMode.NEGATIVE: 5}


@pytest.fixture(scope="module")
def schema():
    """The OpenAPI description that an app serves, with the app to call."""
    text_engine = scripted_text_engine("hello world", chat_template=TEMPLATE)
    app = create_app(ServerState(text_engine), ApiSettings())
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_path_is_described_and_tested(schema) -> None:
    labels = {operation.ok().label for operation in schema.get_all_operations()}
    described = describe()["paths"]
    assert labels == {
        f"{method.upper()} {path}" for path, methods in described.items() for method in methods
    }
    assert POSTS.keys() <= GOOD_BODIES.keys()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_causes_a_server_error(schema, path, mode) -> None:
    """Sends generated bodies, and good bodies with some generated fields, which pass more often."""
    operation = schema[path]["POST"]
    statuses = set()

    @hypothesis.settings(
        max_examples=NUM_EXAMPLES[mode],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), seed=st.integers(0, 99))
    def check(case, seed) -> None:
        bodies = [case.body]
        if isinstance(case.body, dict):
            names = sorted(case.body.keys() - {"model"})
            some = random.Random(seed).sample(names, min(2, len(names)))
            bodies.append(GOOD_BODIES[path] | {name: case.body[name] for name in some})
        for body in bodies:
            case.body = body
            reply = case.call()
            assert reply.status_code < 500, (body, reply.text)
            assert (reply.status_code < 400) or reply.json()["error"]["message"], body
            statuses.add(reply.status_code)

    check()
    assert 400 in statuses
    if mode is GenerationMode.POSITIVE:
        assert 200 in statuses
    assert (
        operation.Case(body=GOOD_BODIES[path], media_type="application/json").call().status_code
        == 200
    )
