"""The table of the API's endpoints that generate: body, preparation, reply and stream of each.

The routes of the server, the batch program and the OpenAPI page read it. To add an endpoint of this
kind, write its adapter beside the others and one entry here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import chat, completions, embeddings, responses
from jaxserve.openai.embeddings import EmbeddingRequest, EmbeddingsReply
from jaxserve.openai.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
)
from jaxserve.openai.responses_protocol import Response, ResponseEvent, ResponsesRequest


class Prepare(Protocol):
    """Checks and admits a request and returns its job."""

    def __call__(
        self, text_engine: TextEngine, body: Any, *, request_id: str = ""
    ) -> Coroutine[Any, Any, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint. Its functions share the type of their job.

    Attributes:
      body: the type of the request body.
      reply: the type of a whole reply.
      prepare: makes a job of a body. Raises if the request will not be served.
      complete: runs a job to its end and returns the reply.
      stream: runs a job and yields its chunks; None: the endpoint does not stream.
      chunk: the type of a chunk, for the OpenAPI page.
      has_named_events: each server-sent event carries the ``type`` of its chunk as its name, and no
        ``[DONE]`` ends the stream.
      in_batch: the batch program serves it.
    """

    body: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    prepare: Prepare
    complete: Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]
    stream: Callable[[Any], AsyncGenerator[Any, None]] | None = None
    chunk: Any = None
    has_named_events: bool = False
    in_batch: bool = True


ENDPOINTS: dict[str, Endpoint] = {
    "/v1/completions": Endpoint(
        body=CompletionRequest,
        reply=Completion,
        prepare=completions.prepare,
        complete=completions.complete,
        stream=completions.stream,
        chunk=Completion,
    ),
    "/v1/chat/completions": Endpoint(
        body=ChatRequest,
        reply=ChatCompletion,
        prepare=chat.prepare,
        complete=chat.complete,
        stream=chat.stream,
        chunk=ChatChunk,
    ),
    "/v1/embeddings": Endpoint(
        body=EmbeddingRequest,
        reply=EmbeddingsReply,
        prepare=embeddings.prepare,
        complete=embeddings.complete,
    ),
    "/v1/responses": Endpoint(
        body=ResponsesRequest,
        reply=Response,
        prepare=responses.prepare,
        complete=responses.complete,
        stream=responses.stream,
        chunk=ResponseEvent,
        has_named_events=True,
        in_batch=False,
    ),
}
"""Paths -> endpoints."""
