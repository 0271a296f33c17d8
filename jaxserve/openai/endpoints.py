"""The generating endpoints of the OpenAI API: one table for everything that serves them.

The HTTP server makes its routes from `ENDPOINTS`, the OpenAPI page its descriptions, and the batch
program looks up the ``url`` of a line in it. A new endpoint is one more entry here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.openai import chat, completions, embeddings, responses
from jaxserve.openai.embeddings import EmbeddingRequest, EmbeddingsReply
from jaxserve.openai.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
)
from jaxserve.openai.responses_protocol import Event, Response, ResponsesRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The functions that read, run and answer the requests of one path.

    Attributes:
      path: the path of the URL.
      body_type: the struct that the JSON body is decoded into. It has a ``request_id``; if the
        endpoint streams, it has a ``stream`` flag too.
      prepare: ``prepare(text_engine, body, request_id=...)`` checks a request and returns a job.
        Raises a JaxserveError if the request cannot be served.
      complete: runs a job to its end and returns the whole reply.
      stream: runs a job and yields its events; None if the endpoint does not stream.
      reply_type: the type of the whole reply.
      event_type: the type of a streamed event; None if the endpoint does not stream.
      framing: how server-sent events are written. ``plain``: data only, and ``[DONE]`` at the end.
        ``named``: each event carries its type as its name, and there is no end marker.
      in_batch: whether the batch program accepts requests for this path.
    """

    path: str
    body_type: type[Any]
    prepare: Callable[..., Coroutine[Any, Any, Any]]
    complete: Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]
    stream: Callable[[Any], AsyncGenerator[msgspec.Struct, None]] | None
    reply_type: type[msgspec.Struct]
    event_type: Any
    framing: Literal["plain", "named"] = "plain"
    in_batch: bool = True


_TABLE = (
    Endpoint(
        path="/v1/completions",
        body_type=CompletionRequest,
        prepare=completions.prepare,
        complete=completions.complete,
        stream=completions.stream,
        reply_type=Completion,
        event_type=Completion,
    ),
    Endpoint(
        path="/v1/chat/completions",
        body_type=ChatRequest,
        prepare=chat.prepare,
        complete=chat.complete,
        stream=chat.stream,
        reply_type=ChatCompletion,
        event_type=ChatChunk,
    ),
    Endpoint(
        path="/v1/responses",
        body_type=ResponsesRequest,
        prepare=responses.prepare,
        complete=responses.complete,
        stream=responses.stream,
        reply_type=Response,
        event_type=Event,
        framing="named",
        in_batch=False,
    ),
    Endpoint(
        path="/v1/embeddings",
        body_type=EmbeddingRequest,
        prepare=embeddings.prepare,
        complete=embeddings.complete,
        stream=None,
        reply_type=EmbeddingsReply,
        event_type=None,
    ),
)

ENDPOINTS = {endpoint.path: endpoint for endpoint in _TABLE}
"""Every endpoint by its path."""
