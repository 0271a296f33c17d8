"""A client of the HTTP API that keeps what a test wants to see, down to the bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Streamed:
    """A stream that has been read to its end.

    Attributes:
      headers: of the reply.
      raw: its body.
      chunks: the JSON values of its events, but for ``[DONE]``.
      done: whether ``[DONE]`` was the last event.
    """

    headers: httpx.Headers
    raw: bytes
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @classmethod
    def parse(cls, headers: httpx.Headers, raw: bytes) -> Streamed:
        """Reads a body that must be framed exactly as the API frames it."""
        assert raw.endswith(b"\n\n"), raw[-100:]
        events = raw.removesuffix(b"\n\n").split(b"\n\n")
        assert all(e.startswith(b"data: ") and b"\n" not in e for e in events), raw
        data = [event.removeprefix(b"data: ") for event in events]
        done = data[-1] == b"[DONE]"
        return cls(headers, raw, [json.loads(d) for d in data[: len(data) - done]], done)

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """The pieces of one answer, in order."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def deltas(self, index: int = 0) -> list[str]:
        """The texts of the pieces that have one."""
        texts = [
            c["text"] if "text" in c else c["delta"].get("content") for c in self.choices(index)
        ]
        return [text for text in texts if text]

    def text(self, index: int = 0) -> str:
        """The whole text of one answer."""
        return "".join(self.deltas(index))

    def finish_reason(self, index: int = 0) -> str | None:
        """Of one answer. Exactly its last piece must have one."""
        reasons = [choice["finish_reason"] for choice in self.choices(index)]
        assert reasons[:-1] == [None] * (len(reasons) - 1), reasons
        return reasons[-1]

    @property
    def usage(self) -> dict[str, Any] | None:
        """That of the last chunk."""
        return self.chunks[-1].get("usage")


class ApiClient:
    """Calls one server. The methods that take a body as keywords want the reply to be a success.

    Attributes:
      url: of the server, without a path.
      http: what it calls with.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """``options`` are those of `httpx.Client`."""
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120, **options)
        self._good: str | None = None

    def close(self) -> None:
        """Closes its connections."""
        self.http.close()

    def post(self, path: str, body: Any) -> httpx.Response:
        """The reply to a body that is bytes or text as it stands, or else made JSON."""
        if isinstance(body, bytes | str):
            return self.http.post(path, content=body, headers={"content-type": "application/json"})
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """The reply of /v1/completions."""
        return _success(self.post(COMPLETIONS, {"prompt": prompt, **body}))

    def chat(self, messages: str | list[Any], **body: Any) -> dict[str, Any]:
        """The reply of /v1/chat/completions; a text is what the user says."""
        return _success(self.post(CHAT, {"messages": _messages(messages), **body}))

    def stream_complete(self, prompt: Any, **body: Any) -> Streamed:
        """The stream of /v1/completions."""
        return self.stream(COMPLETIONS, {"prompt": prompt, **body})

    def stream_chat(self, messages: str | list[Any], **body: Any) -> Streamed:
        """The stream of /v1/chat/completions."""
        return self.stream(CHAT, {"messages": _messages(messages), **body})

    def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """The stream that follows a body."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        return Streamed.parse(reply.headers, reply.content)

    def refused(self, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
        """The error with which a body is refused, after which a good request must succeed."""
        reply = self.post(path, body)
        assert reply.status_code == status, (reply.status_code, reply.text)
        assert reply.headers["content-type"].startswith("application/json")
        error = reply.json()["error"]
        assert error["message"]
        assert error.keys() >= {"message", "type", "param", "code"}
        self.good_request()
        return error

    def good_request(self) -> None:
        """A request that must succeed, with the same text each time."""
        body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        reply = self.complete([1, 2], **body)
        assert reply["usage"]["completion_tokens"] == 2
        (choice,) = reply["choices"]
        self._good = choice["text"] if self._good is None else self._good
        assert choice["text"] == self._good

    def metric(self, name: str, **labels: str) -> float:
        """The value of the one sample with the name after ``vllm:`` and with these labels."""
        (value,) = [
            sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        ]
        return value

    def until_idle(self, *, within_s: float = 30) -> None:
        """Waits until no request is on board and no block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        self.until(lambda: not any(map(self.metric, names)), within_s=within_s)

    def until(self, condition: Callable[[], bool], *, within_s: float = 30) -> None:
        """Waits for a condition; that it does not come is an error."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"still not so after {within_s} s"
            time.sleep(0.02)

    def async_http(self) -> httpx.AsyncClient:
        """To call the same server many times at once."""
        return httpx.AsyncClient(base_url=self.url, timeout=120)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        )


def _success(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return reply.json()


def _messages(messages: str | list[Any]) -> list[Any]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
