"""HTTP as proxies, old clients and other tools speak it.

The IDs in the docstrings are those of the second round of cases.
"""

import gzip
import json
import socket
import zlib

import httpx
import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS, Streamed
from jaxserve.testing.scripted_checkpoint import EOS

RESPONSES = "/v1/responses"
BODIES = {
    COMPLETIONS: {"prompt": "<ab>", "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "<ab>"}], "temperature": 0},
    RESPONSES: {"input": "<ab>", "temperature": 0},
}
EVERY_PATH = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def checkpoint(scripted_checkpoint):
    return scripted_checkpoint(ab=["A", "B", "C", EOS])


@pytest.fixture(scope="module")
def server(serve, checkpoint):
    return serve(checkpoint, max_body_mib=2)


@pytest.fixture(scope="module")
def prefixed(serve, checkpoint):
    return serve(checkpoint, root_path="/llm", api_key="clé-à")


def text_of(reply):
    """Returns the text of a whole reply of any path."""
    if "output" in reply:
        return reply["output"][-1]["content"][0]["text"]
    (choice,) = reply["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def send(server, request: bytes) -> tuple[bytes, bytes]:
    """Returns the head and the body of a reply that ends with its connection."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(request)
        raw = b""
        while data := connection.recv(65536):
            raw += data
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.lower(), body


def http_1_0(path, body) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


@EVERY_PATH
def test_a_stream_to_http_1_0_has_no_chunks(server, path) -> None:
    """PUB-26."""
    head, raw = send(server, http_1_0(path, BODIES[path] | {"stream": True}))
    assert head.startswith(b"http/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if path == RESPONSES:
        data = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
        assert text_of(json.loads(data[-1])["response"]) == "ABC"
    else:
        stream = Streamed.parse(httpx.Headers(), raw)
        assert stream.done
        text = "".join(
            c.get("text") or c.get("delta", {}).get("content") or "" for c in stream.choices()
        )
        assert text == "ABC"
    head, raw = send(server, http_1_0(path, BODIES[path]))
    assert text_of(json.loads(raw)) == "ABC"


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def post_encoded(server, path, content, encoding):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return server.http.post(path, content=content, headers=headers)


@EVERY_PATH
@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)],
)
def test_a_compressed_body_is_decoded(server, path, encoding, compress) -> None:
    """PUB-27."""
    content = compress(json.dumps(BODIES[path]).encode())
    reply = post_encoded(server, path, content, encoding)
    assert reply.status_code == 200, reply.text
    assert text_of(reply.json()) == "ABC"


@EVERY_PATH
def test_the_limit_of_a_body_holds_for_the_decoded_one(server, path) -> None:
    """PUB-27."""
    for size in (2 * 2**20 + 1, 200 * 2**20):
        content = gzip.compress(b" " * size)
        reply = post_encoded(server, path, content, "gzip")
        assert reply.status_code == 413, reply.text
        assert "2 MiB" in reply.json()["error"]["message"]
    server.good_request()


@EVERY_PATH
@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip"])
def test_an_unknown_encoding_is_named_in_a_415(server, path, encoding) -> None:
    """PUB-27."""
    content = b"\x28\xb5\x2f\xfd" + json.dumps(BODIES[path]).encode()
    reply = post_encoded(server, path, content, encoding)
    assert reply.status_code == 415
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    error = reply.json()["error"]
    assert "Content-Encoding" in error["message"]
    assert encoding in error["message"]
    server.good_request()


@EVERY_PATH
def test_a_byte_order_mark_is_skipped(server, path) -> None:
    """PUB-28."""
    content = b"\xef\xbb\xbf" + json.dumps(BODIES[path]).encode()
    reply = server.post(path, content)
    assert reply.status_code == 200, reply.text
    assert text_of(reply.json()) == "ABC"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        error = server.refused(path, json.dumps(BODIES[path]).encode(encoding))
        assert "UTF-16" in error["message"]
        assert "UTF-8" in error["message"]


@EVERY_PATH
def test_a_slash_at_the_end_of_a_path_is_served(server, prefixed, path) -> None:
    """JS-191."""
    headers = {"host": "public.example", "x-forwarded-proto": "https"}
    reply = server.http.post(path + "/", json=BODIES[path])
    assert reply.status_code == 200, reply.text
    assert text_of(reply.json()) == "ABC"
    headers["authorization"] = "Bearer clé-à".encode()
    for prefix in ("/llm", ""):
        reply = prefixed.http.post(prefix + path + "/", json=BODIES[path], headers=headers)
        assert reply.status_code == 200, reply.text
        assert text_of(reply.json()) == "ABC"


def test_no_path_is_answered_with_a_redirect(server, prefixed) -> None:
    """JS-191."""
    headers = {"authorization": "Bearer clé-à".encode()}
    for path in ("/health", "/live", "/version", "/metrics", "/load", "/v1/models", "/server_info"):
        assert server.http.get(path + "/").status_code == 200
        assert prefixed.http.get("/llm" + path + "/", headers=headers).status_code == 200
    (model,) = server.http.get("/v1/models").json()["data"]
    assert server.http.get(f"/v1/models/{model['id']}/").json()["id"] == model["id"]
    assert server.http.post("/v1/tokenize/", json={"prompt": "A"}).status_code == 200
    assert prefixed.http.get("/health/").status_code == 401, "only /health itself is open"
    for path in ("/nothing/", "/v1/", "/llm/", "/v1/completions//", "/health//"):
        for method in ("GET", "POST"):
            reply = server.http.request(method, path)
            assert reply.status_code == 404
            assert reply.json()["error"]["message"]
    assert server.http.get("/v1/completions/").status_code == 405


@EVERY_PATH
def test_a_double_slash_gets_a_hint(server, path) -> None:
    """PUB-30."""
    tail = path.removeprefix("/v1")
    wrong = ["/v1/" + tail, "/" + path, "/v1" + path, tail, "//v1//" + tail]
    for given in wrong:
        url = httpx.URL(server.url).copy_with(raw_path=given.encode())
        reply = server.http.post(url, json=BODIES[path])
        assert reply.status_code == 404, given
        assert f"did you mean {path}?" in reply.json()["error"]["message"], given


def test_a_key_beyond_ascii_works_in_both_encodings(prefixed) -> None:
    for key, status in (
        ("clé-à".encode(), 200),
        ("clé-à".encode("latin-1"), 200),
        *((key, 401) for key in ("clé-".encode(), "clé-á".encode(), b"cl\xe9-", b"clA\xa9-A")),
    ):
        headers = {"authorization": b"Bearer " + key}
        assert prefixed.http.get("/v1/models", headers=headers).status_code == status, key


def test_a_request_has_one_host(server) -> None:
    for hosts in ([], ["a", "b"]):
        lines = ["GET /live HTTP/1.1", *(f"Host: {host}" for host in hosts), "", ""]
        head, body = send(server, "\r\n".join(lines).encode())
        assert head.startswith(b"http/1.1 400 ")
        assert "Host" in json.loads(body)["error"]["message"]
    server.good_request()
