"""An application in front of a scripted engine, and clients that call it without sockets."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jaxserve.front.text_engine import TextEngine
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.settings import ApiSettings
from server.state import ServerState


@pytest.fixture
def text_engine() -> TextEngine:
    return scripted_text_engine("hello world")


@pytest.fixture
def make_client(text_engine) -> Callable[..., httpx.AsyncClient]:
    """Makes clients of an application with the given settings, by default ready to serve."""

    def make(*, state: ServerState | None = None, **settings: Any) -> httpx.AsyncClient:
        app = create_app(state or ServerState(text_engine), ApiSettings(**settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    return make


@pytest.fixture(scope="session")
def check_error() -> Callable[..., str]:
    """``check_error(response, status, param=, code=)`` checks an error, and returns its message."""

    def check_error(
        response: httpx.Response, status: int, *, param: str | None = None, code: Any = None
    ) -> str:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        (error,) = response.json().values()
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert error["code"] == (code or status)
        assert "Traceback" not in error["message"]
        assert not re.search("0x[0-9a-f]{6}", error["message"])
        return error["message"]

    return check_error
