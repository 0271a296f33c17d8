"""The stream of one answer, from the engine's tokens to pieces of text, and several in one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from jaxserve.client.protocol import Engine
from jaxserve.errors import RequestFailedError
from jaxserve.front.metrics import RequestMetrics, RequestRecord
from jaxserve.front.parsed_text import ParsedStep, ParsedText
from jaxserve.ipc.messages import FinishReason, RequestOutput, Submit, TokenLogprobs
from jaxserve.parsing.events import Event
from jaxserve.parsing.message_parser import MessageParser
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import Detokenizer, NullDetokenizer
from jaxserve.text.tokenizer import Tokenizer

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What has been added to one answer.

    Attributes:
      index: which of the answers.
      text: new text, of whole characters; may be empty while some is held back. Of an answer that
        is parsed, its content alone.
      token_ids: the new tokens, also those that show no text.
      logprobs: one entry a token if the request asked for them.
      finish_reason: "stop", "length" or "abort" on the last delta of an answer, else None.
      stop_reason: the stop string or stop id that ended the answer.
      num_cached_tokens: tokens of the prompt that were in the prefix cache.
      prompt_logprobs: on the first delta of an answer, if the request asked for them: an entry for
        each token of the prompt, None for the first.
      events: what the parser of the answer says; None if it has none.
      num_reasoning_tokens: how many of the tokens the parser finds in a think block.
      embedding: the vector of the prompt, not normalised, if that is what was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    events: list[Event] | None = None
    num_reasoning_tokens: int = 0
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to generate. ``params.n`` is 1 and ``params.max_tokens`` is set.

    With a ``parser`` its text becomes events, and stop strings are looked for in content alone.
    """

    index: int
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_token_id: int | None
    priority: int
    cache_salt: str
    record: RequestRecord
    parser: MessageParser | None = None


async def stream_answer(
    answer: Answer, engine: Engine, tokenizer: Tokenizer, metrics: RequestMetrics
) -> AsyncGenerator[Delta, None]:
    """Runs an answer. A stop string, an error and closing the generator abort it in the engine.

    Raises:
      EngineDeadError, RequestFailedError: there will be no more of this answer.
    """
    detokenizer = _detokenizer(answer, tokenizer)
    record, ended = answer.record, "abort"
    outputs = engine.generate(
        Submit(
            answer.request_id,
            answer.prompt_ids,
            msgspec.structs.replace(answer.params, stop=()),
            eos_token_id=answer.eos_token_id,
            priority=answer.priority,
            arrival_s=record.arrival_s,
            cache_salt=answer.cache_salt,
        )
    )
    delta = None
    try:
        async with aclosing(outputs):
            async for output in outputs:
                delta = _to_delta(answer, output, detokenizer)
                record.num_cached_tokens = output.num_cached_tokens
                record.scheduled_s = output.scheduled_s
                if delta.token_ids or delta.embedding is not None:
                    metrics.tokens_arrived(record, len(delta.token_ids), time.monotonic())
                if delta.finish_reason is not None:
                    break
                yield delta
        # The engine has let go of the request before the client hears of the end.
        assert delta is not None, "the engine ended a request without a word"
        assert delta.finish_reason is not None, "the engine ended a request without a reason"
        ended = delta.finish_reason
        yield delta
    except Exception:
        ended = "error"
        raise
    finally:
        metrics.request_ended(record, ended, time.monotonic())


def _detokenizer(
    answer: Answer, tokenizer: Tokenizer
) -> Detokenizer | ParsedText | NullDetokenizer:
    params = answer.params
    if not params.detokenize:
        return NullDetokenizer()
    options: dict[str, Any] = {
        "skip_special_tokens": params.skip_special_tokens,
        "stop": params.stop,
        "include_stop": params.include_stop_str_in_output,
        "min_tokens": params.min_tokens,
    }
    if answer.parser is None:
        return Detokenizer(tokenizer, **options)
    return ParsedText(tokenizer, answer.parser, **options)


def _to_delta(
    answer: Answer, output: RequestOutput, detokenizer: Detokenizer | ParsedText | NullDetokenizer
) -> Delta:
    token_ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
    if reason == FinishReason.ERROR:
        raise RequestFailedError("the engine could not go on with this request")
    shown = token_ids
    if reason == FinishReason.STOP and not answer.params.include_stop_str_in_output:
        # The token that ended the answer is not part of its text. A grammar needs no such token.
        has_end_token = output.stop_reason is not None or token_ids[-1:] == [answer.eos_token_id]
        shown = token_ids[:-1] if has_end_token else token_ids
    step = detokenizer.push(shown, finished=reason is not None)
    finish_reason = None if reason is None else FinishReason(reason).name.lower()
    stop_reason = output.stop_reason
    if step.stop_hit is not None:
        finish_reason, stop_reason = "stop", step.stop_hit
        token_ids = token_ids[: step.num_tokens_used]
        logprobs = None if logprobs is None else logprobs[: step.num_tokens_used]
    return Delta(
        answer.index,
        step.text_delta,
        token_ids,
        logprobs,
        finish_reason,
        stop_reason,
        output.num_cached_tokens,
        output.prompt_logprobs,
        step.events if isinstance(step, ParsedStep) else None,
        step.num_reasoning_tokens if isinstance(step, ParsedStep) else 0,
        output.embedding,
    )


def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come. The first error ends it; ending it closes them all."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    ended = object()
    arrived: asyncio.Queue = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await arrived.put(item)
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(ended)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(pumps)
        while open_streams:
            item = await arrived.get()
            if item is ended:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
