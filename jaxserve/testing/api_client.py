"""A client of the HTTP API for tests, which keeps replies and streams byte by byte."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.testing.waiting import wait_until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Streamed:
    """A stream that has been read to its end.

    Attributes:
      headers: headers of the reply.
      raw: body of the reply.
      chunks: JSON values of all events but ``[DONE]``.
      done: whether ``[DONE]`` was the last event.
    """

    headers: httpx.Headers
    raw: bytes
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @classmethod
    def parse(cls, headers: httpx.Headers, raw: bytes) -> Streamed:
        """Parses a body, and asserts that every byte follows the event format of the API."""
        assert raw.endswith(b"\n\n"), raw[-100:]
        events = raw.removesuffix(b"\n\n").split(b"\n\n")
        assert all(e.startswith(b"data: ") and b"\n" not in e for e in events), raw
        data = [event.removeprefix(b"data: ") for event in events]
        done = data[-1] == b"[DONE]"
        return cls(headers, raw, [json.loads(d) for d in data[: len(data) - done]], done)

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """Returns the chunks of one choice, in order."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def deltas(self, index: int = 0) -> list[str]:
        """Returns the pieces of text of one choice, without empty ones."""
        texts = [
            c["text"] if "text" in c else c["delta"].get("content") for c in self.choices(index)
        ]
        return [text for text in texts if text]

    def text(self, index: int = 0) -> str:
        """Returns the whole text of one choice."""
        return "".join(self.deltas(index))

    def finish_reason(self, index: int = 0) -> str | None:
        """Returns the finish reason of one choice, and asserts that only its last chunk has one."""
        reasons = [choice["finish_reason"] for choice in self.choices(index)]
        assert reasons[:-1] == [None] * (len(reasons) - 1), reasons
        return reasons[-1]

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage in the last chunk."""
        return self.chunks[-1].get("usage")


class ApiClient:
    """Calls one server. Methods that take the body as keywords assert that the call succeeds.

    Attributes:
      url: URL of the server, without a path.
      http: the HTTP client.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """Creates a client; ``options`` are arguments of `httpx.Client`."""
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120, **options)
        self._good_text: str | None = None  # the text of the first `good_request`

    def close(self) -> None:
        """Closes all connections."""
        self.http.close()

    def post(self, path: str, body: Any) -> httpx.Response:
        """Posts a body, encoded as JSON unless it is bytes or a string, and returns the reply."""
        if isinstance(body, bytes | str):
            return self.http.post(path, content=body, headers={"content-type": "application/json"})
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """Returns the reply of /v1/completions."""
        return _success(self.post(COMPLETIONS, {"prompt": prompt, **body}))

    def chat(self, messages: str | list[Any], **body: Any) -> dict[str, Any]:
        """Returns the reply of /v1/chat/completions; a string becomes one user message."""
        return _success(self.post(CHAT, {"messages": _messages(messages), **body}))

    def stream_complete(self, prompt: Any, **body: Any) -> Streamed:
        """Returns the whole stream of /v1/completions."""
        return self.stream(COMPLETIONS, {"prompt": prompt, **body})

    def stream_chat(self, messages: str | list[Any], **body: Any) -> Streamed:
        """Returns the whole stream of /v1/chat/completions."""
        return self.stream(CHAT, {"messages": _messages(messages), **body})

    def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """Posts a body with ``stream`` and returns the whole stream."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        return Streamed.parse(reply.headers, reply.content)

    def refused(self, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
        """Asserts that a body is refused and that the server still works; returns the error."""
        reply = self.post(path, body)
        assert reply.status_code == status, (reply.status_code, reply.text)
        assert reply.headers["content-type"].startswith("application/json")
        error = reply.json()["error"]
        assert error["message"]
        assert error.keys() >= {"message", "type", "param", "code"}
        self.good_request()
        return error

    def good_request(self) -> None:
        """Asserts that a request succeeds, with the same text in every call."""
        body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        reply = self.complete([1, 2], **body)
        assert reply["usage"]["completion_tokens"] == 2
        (choice,) = reply["choices"]
        self._good_text = choice["text"] if self._good_text is None else self._good_text
        assert choice["text"] == self._good_text

    def metric(self, name: str, **labels: str) -> float:
        """Returns the value of the only sample named ``vllm:`` + name that has these labels."""
        (value,) = [
            sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        ]
        return value

    def until_idle(self, *, within_s: float = 30) -> None:
        """Waits until no request is in flight and no block is in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(map(self.metric, names)), within_s=within_s)

    def async_http(self) -> httpx.AsyncClient:
        """Returns an asynchronous client for concurrent calls to the same server."""
        return httpx.AsyncClient(base_url=self.url, timeout=120)

    def openai(self, **options: Any) -> openai.OpenAI:
        """Returns the official client, configured for this server."""
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        )


def _success(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return reply.json()


def _messages(messages: str | list[Any]) -> list[Any]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
