"""POST /v1/responses: an adapter to the chat that does the work, and its answer as a response."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.outputs import Delta
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import chat
from jaxserve.openai.errors import error_reply
from jaxserve.openai.job import Job
from jaxserve.openai.logprobs import chat_logprobs
from jaxserve.openai.params import chat_params
from jaxserve.openai.protocol import ChatLogprobs
from jaxserve.openai.response_items import ItemWriter
from jaxserve.openai.responses_input import function_tools, in_own_words, to_chat
from jaxserve.openai.responses_protocol import (
    Event,
    InputDetails,
    OutputDetails,
    ReasoningOptions,
    Response,
    ResponsesRequest,
    ResponseUsage,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """The chat that answers, and the response as it was when nothing had been generated."""

    job: Job
    response: Response


async def prepare(
    text_engine: TextEngine, request: ResponsesRequest, *, request_id: str = ""
) -> ResponseJob:
    """Checks a request, renders its input and encodes it.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: it will not be served.
    """
    chat_request = to_chat(request)
    try:
        params = chat_params(chat_request, text_engine.defaults, text_engine.engine.ready)
        job = await chat.prepare(text_engine, chat_request, request_id=request_id)
    except InvalidRequestError as error:
        raise in_own_words(error, request) from error
    response = Response(
        id=job.id.replace("chatcmpl-", "resp_", 1),
        created_at=job.created,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=job.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=request.reasoning or ReasoningOptions(),
        temperature=params.temperature,
        text=_text(request),
        tool_choice=request.tool_choice or "auto",
        tools=[_shown(tool) for tool in function_tools(request)],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        user=request.user,
    )
    return ResponseJob(job, response)


def _text(request: ResponsesRequest) -> dict[str, Any]:
    given = request.text
    return {
        "format": (given and given.format) or {"type": "text"},
        "verbosity": (given and given.verbosity) or "medium",
    }


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "description": None, "parameters": None, "strict": False, **tool}


async def complete(prepared: ResponseJob) -> Response:
    """Runs a job to its end. Closing the coroutine aborts it."""
    output = _Output(prepared)
    async with aclosing(prepared.job.deltas) as deltas:
        async for delta in deltas:
            output.add(delta)
    output.end()
    return output.response


async def stream(prepared: ResponseJob) -> AsyncGenerator[Event, None]:
    """Runs a job and yields its events. An error on the way is an event too, the last one."""
    output = _Output(prepared)
    deltas = prepared.job.deltas
    async with aclosing(deltas):
        # What fails before there is a token is an error of the whole request.
        first = await anext(deltas)
        try:
            yield output.writer.about("created", output.response)
            yield output.writer.about("in_progress", output.response)
            for event in output.add(first):
                yield event
            async for delta in deltas:
                for event in output.add(delta):
                    yield event
            for event in output.end():
                yield event
        except Exception as error:
            yield output.fail(error)


class _Output:
    """A response that grows."""

    def __init__(self, prepared: ResponseJob) -> None:
        self.response = prepared.response
        self.writer = ItemWriter()
        self._job = prepared.job
        self._finish_reason: str | None = None
        self._silent: list[Any] = []  # log probabilities of tokens that have shown no text yet

    def add(self, delta: Delta) -> list[Event]:
        """The events of what has come."""
        job = self._job
        job.usage.add(delta)
        self._finish_reason = job.form.finish_reason(delta)
        pieces = job.form.read(delta)
        if delta.logprobs:
            self._silent += chat_logprobs(job.tokenizer, job.token_name, delta.logprobs).content
        events: list[Event] = []
        for piece in pieces:
            logprobs, self._silent = ChatLogprobs(self._silent), []
            events += self.writer.add(piece, logprobs)
        return events

    def end(self) -> list[Event]:
        """The events at the end; completes the response."""
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
        last = self.writer.about("completed" if is_whole else "incomplete", self.response)
        return [*events, last]

    def fail(self, error: Exception) -> Event:
        """The event of an error."""
        reply = error_reply(error)
        if reply.status == 500:
            logger.error("a response was broken off", exc_info=error)
        self.response = msgspec.structs.replace(
            self.response,
            status="failed",
            error={"code": "server_error", "message": reply.body.error.message},
            output=self.writer.items,
        )
        return self.writer.about("failed", self.response)
