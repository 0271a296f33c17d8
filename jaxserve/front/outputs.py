"""The stream of one completion: from the engine's token IDs to deltas of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from jaxserve.client.protocol import Engine
from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.front.metrics import RequestMetrics, RequestRecord
from jaxserve.front.parsed_text import ParsedDelta, ParsedText
from jaxserve.front.requests import CompletionTask
from jaxserve.ipc.messages import FinishReason, RequestOutput, TokenLogprobs
from jaxserve.parsing.events import Event
from jaxserve.text.detokenizer import Detokenizer, NullDetokenizer
from jaxserve.text.tokenizer import Tokenizer

MAX_DELTA_TOKENS = 256
"""The most tokens of a delta. Turning them into text takes a few milliseconds at most."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """The part of a completion that one engine output adds.

    Attributes:
      index: which completion of the request.
      text: new text, in whole characters; may be empty while characters are held back. The content
        alone, if the completion is parsed.
      token_ids: the new tokens, including those that show no text.
      logprobs: one entry for each token if the request asked for them.
      finish_reason: "stop", "length" or "abort" on the last delta of a completion, else None.
      stop_reason: the stop string or stop ID that ended the completion.
      num_cached_tokens: tokens of the prompt that were in the prefix cache.
      prompt_logprobs: on the first delta of a completion, if the request asked for them: an entry
        for each token of the prompt, None for the first.
      events: the events that the parser found in the new text; None without a parser.
      num_reasoning_tokens: how many of the tokens lie in a think block.
      embedding: the vector of the prompt, not normalised, if the request asked for it.
      record: the times and counts of the completion so far.
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
    embedding: tuple[float, ...] | None = None
    record: RequestRecord | None = None


async def stream_completion(
    task: CompletionTask,
    engine: Engine,
    tokenizer: Tokenizer,
    metrics: RequestMetrics,
    *,
    on_ended: Callable[[], None] | None = None,
) -> AsyncGenerator[Delta, None]:
    """Runs a completion and yields its deltas.

    A stop string, an error or closing the generator aborts the completion in the engine. A reader
    that has not read for a while gets an output of many tokens, which becomes several deltas.

    Args:
      task: the completion.
      engine: runs it.
      tokenizer: the tokenizer of the model.
      metrics: counts its tokens and times.
      on_ended: see `Engine.generate`.

    Raises:
      EngineDeadError: the engine died.
      RequestFailedError: the engine could not continue the completion.
      InvalidRequestError: the completion cannot continue, because of its grammar.
    """
    detokenizer = _detokenizer(task, tokenizer)
    record, ended = task.record, "abort"
    delta = None
    try:
        async with aclosing(engine.generate(task.submit, on_ended=on_ended)) as outputs:
            async for output in outputs:
                for part in _parts(output):
                    if part is not output:
                        await asyncio.sleep(0)  # other tasks run between the parts
                    delta = _to_delta(task, part, detokenizer)
                    if part.scheduled_s:  # not of an abort on the side of the front
                        record.num_cached_tokens = part.num_cached_tokens
                        record.scheduled_s = part.scheduled_s
                    if delta.token_ids or delta.embedding is not None:
                        metrics.tokens_arrived(record, len(delta.token_ids), time.monotonic())
                    if delta.finish_reason is not None:
                        break
                    yield delta
                else:
                    continue
                break
        # Yielded after `generate` is closed: the client sees the end of a completion only when the
        # engine has released it.
        assert delta is not None, "the engine ended a request without an output"
        assert delta.finish_reason is not None, "the engine ended a request without a reason"
        ended = delta.finish_reason
        yield delta
    except Exception:
        ended = "error"
        raise
    finally:
        metrics.request_ended(record, ended, time.monotonic())


def _parts(output: RequestOutput) -> Iterator[RequestOutput]:
    """Yields an output in parts of at most `MAX_DELTA_TOKENS` tokens."""
    ids, logprobs = output.token_ids, output.logprobs
    if len(ids) <= MAX_DELTA_TOKENS:
        yield output
        return
    for start in range(0, len(ids), MAX_DELTA_TOKENS):
        end = start + MAX_DELTA_TOKENS
        is_last = end >= len(ids)
        yield msgspec.structs.replace(
            output,
            token_ids=ids[start:end],
            logprobs=None if logprobs is None else logprobs[start:end],
            finish_reason=output.finish_reason if is_last else None,
            stop_reason=output.stop_reason if is_last else None,
            prompt_logprobs=output.prompt_logprobs if start == 0 else None,
        )


def _detokenizer(
    task: CompletionTask, tokenizer: Tokenizer
) -> Detokenizer | ParsedText | NullDetokenizer:
    params = task.params
    if not params.detokenize:
        return NullDetokenizer()
    options: dict[str, Any] = {
        "skip_special_tokens": params.skip_special_tokens,
        "stop": params.stop,
        "include_stop": params.include_stop_str_in_output,
        "min_tokens": params.min_tokens,
    }
    if task.parser is None:
        return Detokenizer(tokenizer, **options)
    return ParsedText(tokenizer, task.parser, **options)


def _to_delta(
    task: CompletionTask,
    output: RequestOutput,
    detokenizer: Detokenizer | ParsedText | NullDetokenizer,
) -> Delta:
    token_ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
    if reason == FinishReason.ERROR:
        if output.is_user_error and output.error:
            raise InvalidRequestError(output.error)
        raise RequestFailedError(output.error or "the engine could not continue this request")
    shown = token_ids
    if reason == FinishReason.STOP and not task.params.include_stop_str_in_output:
        # The token that ended a completion is not part of its text. A completion that ends with its
        # grammar may have no such token.
        end_id = task.submit.eos_token_id
        has_end_token = output.stop_reason is not None or token_ids[-1:] == [end_id]
        shown = token_ids[:-1] if has_end_token else token_ids
    added = detokenizer.push(shown, finished=reason is not None)
    finish_reason = None if reason is None else FinishReason(reason).name.lower()
    stop_reason = output.stop_reason
    if added.stop_hit is not None:
        finish_reason, stop_reason = "stop", added.stop_hit
        token_ids = token_ids[: added.num_tokens_used]
        logprobs = None if logprobs is None else logprobs[: added.num_tokens_used]
    return Delta(
        task.index,
        added.text_delta,
        token_ids,
        logprobs,
        finish_reason,
        stop_reason,
        output.num_cached_tokens,
        output.prompt_logprobs,
        added.events if isinstance(added, ParsedDelta) else None,
        added.num_reasoning_tokens if isinstance(added, ParsedDelta) else 0,
        output.embedding,
        task.record,
    )
