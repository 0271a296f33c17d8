"""The private parts of uvicorn that the server relies on are still there."""

import asyncio
import inspect
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

ROOT = Path(__file__).parents[2]

SIGNATURES = {
    HttpToolsProtocol: {
        "__init__": ("self", "config", "server_state", "app_state", "_loop"),
        "connection_made": ("self", "transport"),
        "connection_lost": ("self", "exc"),
        "data_received": ("self", "data"),
        "shutdown": ("self",),
        "on_message_begin": ("self",),
        "on_headers_complete": ("self",),
        "on_body": ("self", "body"),
        "on_message_complete": ("self",),
        "on_response_complete": ("self",),
        "_start_asgi_task": ("self", "cycle", "app"),
        "_unset_keepalive_if_required": ("self",),
    },
    RequestResponseCycle: {"send": ("self", "message"), "receive": ("self",)},
    FlowControl: {"drain": ("self",), "pause_reading": ("self",), "resume_reading": ("self",)},
    uvicorn.Server: {
        "startup": ("self", "sockets"),
        "shutdown": ("self", "sockets"),
        "capture_signals": ("self",),
    },
}

PROTOCOL_ATTRIBUTES = {
    *("cycle", "flow", "headers", "loop", "parser", "pipeline", "scope"),
    *("server_state", "timeout_keep_alive", "transport"),
}

CYCLE_ATTRIBUTES = {
    *("body", "chunked_encoding", "disconnected", "expected_content_length", "flow", "keep_alive"),
    *("message_event", "more_body", "response_complete", "response_started", "transport"),
    "waiting_for_100_continue",
}


def changed(what: str) -> str:
    return (
        f"uvicorn {uvicorn.__version__} changed {what}, which server/http.py relies on: adapt "
        "server/http.py and this list, or lower the upper bound of uvicorn in pyproject.toml"
    )


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in SIGNATURES.items() for name in names]
)
def test_methods_have_the_expected_signatures(owner, name) -> None:
    method = getattr(owner, name, None)
    assert method is not None, changed(f"{owner.__name__}.{name}")
    found = tuple(inspect.signature(method).parameters)
    assert found == SIGNATURES[owner][name], changed(f"the signature of {owner.__name__}.{name}")


async def test_connections_have_the_expected_attributes() -> None:
    config = uvicorn.Config(Response(), ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    lifespan = config.lifespan_class(config)
    assert hasattr(lifespan, "state"), changed("Server.lifespan.state")
    state = server.server_state
    assert hasattr(state, "connections"), changed("ServerState.connections")
    assert hasattr(state, "default_headers"), changed("ServerState.default_headers")
    protocol = HttpToolsProtocol(config, state, {})
    missing = {name for name in PROTOCOL_ATTRIBUTES if not hasattr(protocol, name)}
    assert not missing, changed(f"HttpToolsProtocol.{sorted(missing)}")
    protocol.connection_made(Mock(spec=asyncio.Transport))
    protocol.on_message_begin()
    assert protocol.url == b"", changed("HttpToolsProtocol.url")
    assert hasattr(protocol.flow, "write_paused"), changed("FlowControl.write_paused")


async def test_cycles_have_the_expected_attributes() -> None:
    transport = Mock(spec=asyncio.Transport)
    cycle = RequestResponseCycle(
        scope={},  # type: ignore[typeddict-item]
        transport=transport,
        flow=FlowControl(transport),
        logger=logging.getLogger("uvicorn.error"),
        access_logger=logging.getLogger("uvicorn.access"),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    missing = {name for name in CYCLE_ATTRIBUTES if not hasattr(cycle, name)}
    assert not missing, changed(f"RequestResponseCycle.{sorted(missing)}")


def test_status_lines_are_complete() -> None:
    line = getattr(httptools_impl, "STATUS_LINE", {}).get(431)
    assert line == b"HTTP/1.1 431 Request Header Fields Too Large\r\n", changed("STATUS_LINE")


def test_only_two_modules_use_the_private_classes() -> None:
    users = {
        str(path.relative_to(ROOT))
        for package in ("server", "jaxserve")
        for path in (ROOT / package).rglob("*.py")
        if "from uvicorn.protocols" in path.read_text()
    }
    assert users == {"server/http.py", "server/http_cycle.py"}
