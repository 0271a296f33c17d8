"""A server in a thread, as other tests start it."""

import threading

import httpx
import pytest

from jaxserve.errors import CheckpointError, ConfigError
from server.testing import ServerThread, flags


def test_flags_are_the_arguments_of_settings() -> None:
    assert flags(num_blocks=8, warmup=False, async_scheduling=True, api_key=("a", "b")) == [
        *("--num-blocks", "8", "--no-warmup", "--async-scheduling", "--api-key", "a", "b")
    ]


def test_a_server_thread_serves_until_closed(front_checkpoint) -> None:
    before = threading.active_count()
    factory = "jaxserve.testing.fake_engine:build"
    server = ServerThread(*flags(model=front_checkpoint, engine_factory=factory))
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert reply.json()["usage"]["completion_tokens"] == 3
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"model": "/nowhere"}, CheckpointError),
        ({"tool_call_parser": "nonsense"}, ConfigError),
        ({"api_server_count": 2}, ConfigError),
    ],
)
def test_a_failed_start_leaves_no_thread_behind(front_checkpoint, more, error) -> None:
    before = threading.active_count()
    settings = {"model": front_checkpoint, "engine_factory": "jaxserve.testing.fake_engine:build"}
    with pytest.raises(error):
        ServerThread(*flags(**settings | more))
    assert threading.active_count() == before
