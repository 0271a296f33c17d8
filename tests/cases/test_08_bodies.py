"""Bodies of requests as bytes: size, transfer, encoding, JSON and content type."""

import http.client
import json
import socket

import httpx
import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS
from server.http import MAX_UNREAD_BYTES

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


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


@pytest.mark.parametrize(
    "text",
    [
        *(b"\xff\xfe", b"ab\xe4\xb8", b"\xc0\xaf", b"\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"),
        b"<ab>".decode().encode("utf-16"),
    ],
)
def test_js_114_bytes_that_are_not_utf8_are_refused(server, text) -> None:
    for start, path in (
        (b'{"prompt":"', COMPLETIONS),
        (b'{"prompt":"a","user', COMPLETIONS),
        (b'{"messages":[{"role":"user","content":"', CHAT),
        (b'{"prompt":"', "/tokenize"),
    ):
        end = b'"}]}' if path == CHAT else b'"}'
        for raw in (start + text + end, start + text):
            error = server.refused(path, raw)
            assert "JSON" in error["message"]
    whole = json.dumps({"prompt": "a"}).encode("utf-16")
    server.refused(COMPLETIONS, whole)


UNPAIRED_SURROGATES = [
    r"emoji \ud83d",
    r"\udcf0",
    r"\ud83d\ud83d",
    r"\udd25\ud83d",
    r"\ud83d x \udd25",
]


@pytest.mark.parametrize("text", UNPAIRED_SURROGATES)
def test_js_115_an_unpaired_surrogate_is_refused(server, text) -> None:
    for path, raw in (
        (COMPLETIONS, f'{{"prompt":"{text}"}}'),
        (COMPLETIONS, f'{{"prompt":["a","{text}"]}}'),
        (COMPLETIONS, f'{{"prompt":"a","stop":["{text}"]}}'),
        (COMPLETIONS, f'{{"prompt":"a","model":"{text}"}}'),
        (COMPLETIONS, f'{{"prompt":"a","bad_words":["{text}"]}}'),
        (CHAT, f'{{"messages":[{{"role":"user","content":"{text}"}}]}}'),
        (CHAT, f'{{"messages":[{{"role":"{text}","content":"a"}}]}}'),
        ("/tokenize", f'{{"prompt":"{text}"}}'),
    ):
        server.refused(path, raw)


@BOTH_ENDPOINTS
def test_js_115_an_escaped_surrogate_pair_is_one_character(server, path) -> None:
    texts = [r"\ud83d\udd25<ab>", "\U0001f525<ab>"]
    bodies = [json.dumps(body(path)).replace("<ab>", text) for text in texts]
    first, second = (stable_parts(server.post(path, raw.encode()).json()) for raw in bodies)
    assert first == second
    assert first[0]["finish_reason"] == "stop"


def connect(server):
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=60)


def head(path, *lines):
    first = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", ""]
    return "\r\n".join(first).encode()


def read_reply(connection):
    """Returns the status and the JSON body, once the server has closed the connection."""
    raw = b""
    while data := connection.recv(65536):
        raw += data
    start, _, content = raw.partition(b"\r\n\r\n")
    return int(start.split()[1]), json.loads(content)


@BOTH_ENDPOINTS
def test_js_117_a_body_that_is_too_large_is_refused_unread(server, path) -> None:
    """The reply arrives before the body is sent."""
    for size in (2 * 2**20 + 1, 50 * 2**20, 10**15):
        with connect(server) as connection:
            connection.sendall(head(path, f"Content-Length: {size}"))
            status, reply = read_reply(connection)
        assert status == 413
        assert reply["error"]["message"]
    server.good_request()


@BOTH_ENDPOINTS
def test_js_117_a_client_that_sends_everything_before_reading_gets_the_reply(server, path) -> None:
    url = httpx.URL(server.url)
    headers = {"Content-Type": "application/json"}
    pieces = [b" " * 10**5] * 300
    for body in (b"".join(pieces), pieces):  # with Content-Length, and chunked
        connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        assert reply.status == 413
        assert json.loads(reply.read())["error"]["type"] == "RequestTooLargeError"
        connection.close()


def test_js_117_a_large_body_within_the_limit_is_read_and_exceeds_the_context(server) -> None:
    text = "x" * (2 * 2**20 - 100)
    error = server.refused(COMPLETIONS, {"prompt": text})
    assert error["code"] == "context_length_exceeded"
    error = server.refused(CHAT, {"messages": [{"role": "user", "content": text}]})
    assert error["code"] == "context_length_exceeded"


def test_js_118_received_bytes_count_and_not_the_declared_length(server) -> None:
    piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    sent, limit = 0, MAX_UNREAD_BYTES // 2**20 + 50
    with connect(server) as connection:
        connection.sendall(head(COMPLETIONS, "Transfer-Encoding: chunked"))
        connection.settimeout(20)
        try:
            while sent < limit:
                connection.sendall(piece)
                sent += 1
        except (ConnectionError, TimeoutError):
            pass  # the server has stopped reading
        assert sent < limit
    with connect(server) as connection:
        connection.sendall(
            head(COMPLETIONS, "Transfer-Encoding: chunked") + piece * 2 + b"1\r\n \r\n"
        )
        status, reply = read_reply(connection)
    assert status == 413
    assert reply["error"]["type"] == "RequestTooLargeError"
    raw = json.dumps(body(COMPLETIONS)).encode()
    with connect(server) as connection:
        connection.sendall(head(COMPLETIONS, "Content-Length: 5", "Connection: close") + raw)
        status, reply = read_reply(connection)
    assert status == 400
    assert reply["error"]["message"]
    server.good_request()


def test_js_118_an_incomplete_body_times_out(serve, scripted_checkpoint) -> None:
    server = serve(scripted_checkpoint(ab=["A", "B", EOS]), body_timeout=0.4)
    with connect(server) as connection:
        connection.sendall(head(COMPLETIONS, "Content-Length: 100") + b'{"prompt')
        status, reply = read_reply(connection)
    assert status == 408
    assert reply["error"]["message"]
    with connect(server) as connection:
        connection.sendall(head(COMPLETIONS, "Content-Length: 100") + b'{"prompt')
    server.good_request()
    server.until_idle()
    assert server.http.get("/load").json() == {"server_load": 0}


NOT_OBJECTS = ["", " ", "not json", "{", "[]", '"x"', "3", "null", "true", "[{}]", "{'prompt':1}"]


@pytest.mark.parametrize("raw", [*NOT_OBJECTS, '{"prompt":"a"} x', '{"prompt":"a",}', "[" * 50_000])
@BOTH_ENDPOINTS
def test_js_123_bodies_that_are_not_a_request_are_refused(server, path, raw) -> None:
    server.refused(path, raw)


def test_js_123_bodies_without_the_required_field_are_refused(server) -> None:
    for wrong in ({}, {"prompt": "a"}, *({"messages": m} for m in ([], "a", {}, [1], None, [[]]))):
        assert server.refused(CHAT, wrong)["param"].startswith("messages")
    for wrong in ({}, {"messages": []}, *({"prompt": p} for p in ([], {}, 5, None, True, [None]))):
        assert server.refused(COMPLETIONS, wrong)["param"].startswith("prompt")


@BOTH_ENDPOINTS
def test_js_123_content_types_other_than_json_are_refused(server, path) -> None:
    raw = json.dumps(body(path)).encode()
    for content_type, status in (
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("multipart/form-data", 400),
    ):
        headers = {} if content_type is None else {"content-type": content_type}
        reply = server.http.post(path, content=raw, headers=headers)
        assert reply.status_code == status, content_type
        assert ("error" in reply.json()) == (status == 400)
