"""POST /v1/responses: turns a body into a chat request, and its completion into a response."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.outputs import Delta
from jaxserve.front.text_engine import MEASURED_SIZE, TextEngine
from jaxserve.openai import chat
from jaxserve.openai.errors import error_reply, log_failure
from jaxserve.openai.job import Job
from jaxserve.openai.limits import check_ids_in_flight
from jaxserve.openai.logprobs import chat_logprobs
from jaxserve.openai.params import check_fields
from jaxserve.openai.protocol import ChatLogprobs
from jaxserve.openai.response_items import ItemWriter
from jaxserve.openai.responses_input import to_chat, with_response_fields
from jaxserve.openai.responses_protocol import (
    Event,
    InputDetails,
    OutputDetails,
    ReasoningOptions,
    Response,
    ResponsesRequest,
    ResponseUsage,
)
from jaxserve.openai.responses_tools import FunctionTool, function_tools
from jaxserve.text.json_size import size_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """The chat job that does the work, and the response before anything was generated.

    Attributes:
      job: the chat job.
      response: the response.
      tools: the functions that have a namespace, by the names that the model sees.
    """

    job: Job
    response: Response
    tools: Mapping[str, FunctionTool]


async def prepare(
    text_engine: TextEngine, body: ResponsesRequest, *, request_id: str = ""
) -> ResponseJob:
    """Checks a request, renders its input, encodes it and admits the request.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request will not be served.
    """
    try:
        text_engine.model.check_name(body.model)
        with text_engine.admit(1, 1, param="input") as permit:
            size = size_of(body, MEASURED_SIZE)
            chat_body = await text_engine.build(lambda: to_chat(body), size=size)
            check_fields(chat_body)
            check_ids_in_flight(chat_body, 1)
            job = await chat.prepare_admitted(text_engine, chat_body, permit, request_id=request_id)
    except InvalidRequestError as error:
        raise with_response_fields(error, body) from error
    tools = function_tools(body)
    response = Response(
        id=job.id.replace("chatcmpl-", "resp_", 1),
        created_at=job.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=job.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or ReasoningOptions(),
        temperature=job.params.temperature,
        text=_text(body),
        tool_choice=body.tool_choice or "auto",
        tools=[_shown(t.definition) for t in tools if t.namespace is None],
        top_logprobs=body.top_logprobs or 0,
        top_p=job.params.top_p,
        user=body.user,
    )
    in_namespaces = {t.shown_name: t for t in tools if t.namespace is not None}
    return ResponseJob(job, response, in_namespaces)


def _text(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the ``text`` field of a response."""
    given = request.text
    return {
        "format": (given and given.format) or {"type": "text"},
        "verbosity": (given and given.verbosity) or "medium",
    }


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool with all fields that a response shows."""
    return {"type": "function", "description": None, "parameters": None, "strict": False, **tool}


async def complete(prepared: ResponseJob) -> Response:
    """Runs a job to its end and returns the response. Cancelling it aborts the request."""
    output = _Output(prepared)
    async with aclosing(prepared.job.deltas) as deltas:
        async for delta in deltas:
            await prepared.job.build(output.add, delta)
    output.end()
    return output.response


async def stream(prepared: ResponseJob) -> AsyncGenerator[Event, None]:
    """Runs a job and yields its events. An error after the first token becomes the last event."""
    output = _Output(prepared)
    deltas = prepared.job.deltas
    async with aclosing(deltas):
        # An error before the first token is an error of the whole request.
        first = await anext(deltas)
        try:
            yield output.writer.response_event("created", output.response)
            yield output.writer.response_event("in_progress", output.response)
            for event in await prepared.job.build(output.add, first):
                yield event
            async for delta in deltas:
                for event in await prepared.job.build(output.add, delta):
                    yield event
            for event in output.end():
                yield event
        except Exception as error:
            yield output.fail(error)


class _Output:
    """Builds a response from the deltas of its chat job."""

    def __init__(self, prepared: ResponseJob) -> None:
        self.response = prepared.response
        self.writer = ItemWriter(prepared.tools)
        self._job = prepared.job
        self._finish_reason: str | None = None
        self._held_logprobs: list[Any] = []  # of tokens whose text is held back

    def add(self, delta: Delta) -> list[Event]:
        """Returns the events of a delta."""
        job = self._job
        job.usage.add(delta)
        self._finish_reason = job.form.finish_reason(delta)
        pieces = job.form.pieces(delta)
        if delta.logprobs:
            new = chat_logprobs(job.tokenizer, job.token_name, delta.logprobs)
            self._held_logprobs += new.content
        events: list[Event] = []
        for piece in pieces:
            logprobs, self._held_logprobs = ChatLogprobs(self._held_logprobs), []
            events += self.writer.add(piece, logprobs)
        return events

    def end(self) -> list[Event]:
        """Completes the response and returns its last events."""
        cut_off = self._finish_reason == "length"
        is_whole = self._finish_reason in ("stop", "tool_calls")
        events = self.writer.end("completed" if is_whole else "incomplete")
        usage = self._job.usage
        self.response = msgspec.structs.replace(
            self.response,
            status="completed" if is_whole else "incomplete" if cut_off else "cancelled",
            incomplete_details={"reason": "max_output_tokens"} if cut_off else None,
            output=self.writer.items,
            usage=ResponseUsage(
                usage.num_prompt_tokens,
                InputDetails(usage.num_cached_tokens),
                usage.num_completion_tokens,
                OutputDetails(usage.num_reasoning_tokens or 0),
                usage.num_prompt_tokens + usage.num_completion_tokens,
            ),
        )
        last = self.writer.response_event("completed" if is_whole else "incomplete", self.response)
        return [*events, last]

    def fail(self, error: Exception) -> Event:
        """Marks the response as failed and returns its last event."""
        reply = error_reply(error)
        log_failure(logger, "a response failed", error)
        self.response = msgspec.structs.replace(
            self.response,
            status="failed",
            error={"code": "server_error", "message": reply.body.error.message},
            output=self.writer.items,
        )
        return self.writer.response_event("failed", self.response)
