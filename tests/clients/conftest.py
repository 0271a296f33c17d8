"""An HTTP server in front of a scripted engine, for tests with existing clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.front.text_engine import TextEngine
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.listen import listen, url_of
from server.serving import http_server
from server.settings import ApiSettings, ServerSettings
from server.state import ServerState

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> <think> #}"


class Server:
    """Serves a text engine from construction until `close`; ``url`` has no path."""

    def __init__(self, text_engine: TextEngine) -> None:
        self.text_engine = text_engine
        listeners = listen("127.0.0.1", 0)
        self.url = url_of(listeners)
        app = create_app(ServerState(text_engine), ApiSettings())
        self._http = http_server(app, ServerSettings())
        work = self._http.serve(sockets=listeners)
        self._thread = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.should_exit = True
        self._thread.join()

    def last_prompt(self) -> str:
        """Returns the text of the last prompt that the engine received."""
        prompt = self.text_engine.engine.submitted[-1].prompt_token_ids
        return self.text_engine.model.tokenizer.decode(prompt)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """``serve(*completions, **options)`` starts a server in front of `scripted_text_engine`."""
    servers: list[Server] = []

    def serve(*completions: str, **options: Any) -> Server:
        options = {"chat_template": TEMPLATE, **options}
        servers.append(Server(scripted_text_engine(*completions, **options)))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()
