"""Runs a file of requests on an engine; each gets the reply that the server would send."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field

from tqdm import tqdm

from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError
from jaxserve.front.concurrency import for_each
from jaxserve.front.text_engine import TextEngine
from jaxserve.offline.batch_file import OK, BadLine, BatchRequest, BatchResult, read_requests
from jaxserve.offline.open_files import Requests, Results
from jaxserve.openai.decoding import decode
from jaxserve.openai.endpoints import ENDPOINTS
from jaxserve.openai.protocol import GenerationRequest
from jaxserve.program.threads import in_daemon_thread

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 10.0
"""Seconds between progress lines when there is no terminal for a bar."""


_ENDPOINTS = {path: endpoint for path, endpoint in ENDPOINTS.items() if endpoint.in_batch}


@dataclass(slots=True)
class Totals:
    """The counts of a run. ``num_kept`` is the number of answers kept from an earlier run."""

    num_kept: int = 0
    num_answered: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def add(self, result: BatchResult) -> None:
        """Counts a result."""
        if result.response is None or result.response.status_code != OK:
            self.num_errors += 1
            return
        self.num_answered += 1
        self.prompt_tokens += result.response.body.usage.prompt_tokens
        self.output_tokens += result.response.body.usage.completion_tokens

    @property
    def num_done(self) -> int:
        """The number of requests that have a result."""
        return self.num_kept + self.num_answered + self.num_errors

    def describe(self) -> str:
        """Returns the counts as one line of text."""
        seconds = max(time.monotonic() - self.began_s, 1e-3)
        kept = f" and {self.num_kept} kept from before" if self.num_kept else ""
        return (
            f"{self.num_answered} answered{kept}, {self.num_errors} errors, {self.prompt_tokens} "
            f"prompt tokens, {self.output_tokens} output tokens in {seconds:.1f} s: "
            f"{self.output_tokens / seconds:.0f} output tokens/s"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """The display of the progress of a run.

    Attributes:
      num_requests: the number of requests, if it is known.
      bar_columns: the width of the bar; None: there is no bar.
    """

    num_requests: int | None
    bar_columns: int | None

    def bar(self) -> tqdm:
        """Returns the bar, which shows nothing if there is none."""
        return tqdm(
            total=self.num_requests,
            unit="request",
            ncols=self.bar_columns,
            disable=self.bar_columns is None,
        )


async def run_batch(
    open_engine: Callable[[], AbstractAsyncContextManager[TextEngine]],
    requests: Requests,
    results: Results,
    *,
    limit: Callable[[TextEngine], int],
    bar_columns: int | None = None,
) -> Totals:
    """Answers every request that has no answer yet.

    For a request that cannot be served, the output has an error, and the run continues. Each result
    is written as soon as it exists, so an early end loses none.

    Args:
      open_engine: loads the model. Called for the first request without an answer, so a run with
        nothing to do loads no model.
      requests: the input.
      results: the output. It is unchanged until the model is loaded.
      limit: returns the most requests in flight on an engine.
      bar_columns: the width of a progress bar; None prints lines instead of a bar.

    Raises:
      EngineDeadError: the engine is dead; the requests in flight have no result.
      OSError: the input cannot be read, or the output cannot be written.
    """
    totals = Totals()
    bad_lines: list[BadLine] = []
    async with (
        aclosing(requests.lines()) as lines,
        aclosing(read_requests(lines)) as read,
        aclosing(_unanswered(read, results, totals)) as todo,
    ):
        async for request in todo:
            if isinstance(request, BadLine):
                bad_lines.append(request)
                continue
            async with open_engine() as text_engine:
                results.begin()
                totals.began_s = time.monotonic()
                progress = Progress(await in_daemon_thread(requests.count), bar_columns)
                async with aclosing(_chain([*bad_lines, request], todo)) as rest:
                    await _answer_all(
                        text_engine, rest, results, totals, progress, limit(text_engine)
                    )
            return totals
    results.begin()
    for line in bad_lines:
        _write(BatchResult.of_bad_line(line.custom_id, line.reason), results, totals)
    await results.flush()
    print(totals.describe(), file=sys.stderr)
    return totals


async def _unanswered(
    requests: AsyncIterator[BatchRequest | BadLine], results: Results, totals: Totals
) -> AsyncGenerator[BatchRequest | BadLine, None]:
    async for request in requests:
        if isinstance(request, BatchRequest) and request.custom_id in results.answered:
            totals.num_kept += 1
        else:
            yield request


async def _chain(
    first: Sequence[BatchRequest | BadLine], rest: AsyncIterator[BatchRequest | BadLine]
) -> AsyncGenerator[BatchRequest | BadLine, None]:
    for request in first:
        yield request
    async for request in rest:
        yield request


async def _answer_all(
    text_engine: TextEngine,
    requests: AsyncIterator[BatchRequest | BadLine],
    results: Results,
    totals: Totals,
    progress: Progress,
    limit: int,
) -> None:
    """Answers requests, with up to ``limit`` in flight, and shows the progress."""

    async def work(request: BatchRequest | BadLine) -> None:
        result = await answer(text_engine, request)
        # Written in the task itself: once a result exists, cancelling the run cannot lose it.
        _write(result, results, totals)
        bar.update(totals.num_done - bar.n)
        rate = totals.output_tokens / max(time.monotonic() - totals.began_s, 1e-3)
        bar.set_postfix_str(f"{rate:.0f} tokens/s, {totals.num_errors} errors", refresh=False)
        # A reader of the results that is slow holds new requests back.
        await results.flush()

    with progress.bar() as bar:
        reporter = asyncio.create_task(_report(totals, progress))
        try:
            await for_each(requests, work, limit=limit)
        finally:
            reporter.cancel()
            bar.close()
            print(totals.describe(), file=sys.stderr)


def _write(result: BatchResult, results: Results, totals: Totals) -> None:
    results.write(result)
    totals.add(result)


async def answer(text_engine: TextEngine, request: BatchRequest | BadLine) -> BatchResult:
    """Returns the result of one line.

    Raises:
      EngineDeadError: the engine is dead.
    """
    if isinstance(request, BadLine):
        return BatchResult.of_bad_line(request.custom_id, request.reason)
    endpoint = _ENDPOINTS.get(request.url)
    if endpoint is None:
        known = ", ".join(_ENDPOINTS)
        reason = f"url must be one of {known}, got {request.url[:200]!r}"
        return BatchResult.of_bad_line(request.custom_id, reason)
    if request.method != "POST":
        reason = f"method must be 'POST', got {request.method[:20]!r}"
        return BatchResult.of_bad_line(request.custom_id, reason)
    try:
        body = decode(bytes(request.body), endpoint.body_type)
        if isinstance(body, GenerationRequest) and body.stream:
            raise InvalidRequestError("stream cannot be true in a batch", param="stream")
        reply = await endpoint.complete(await endpoint.prepare(text_engine, body))
    except EngineDeadError:
        raise
    except JaxserveError as error:
        return BatchResult.of_error(request.custom_id, error)
    except Exception as error:
        # One failed request must not end a run of hours.
        logger.exception("request %r failed", request.custom_id)
        return BatchResult.of_error(request.custom_id, error)
    return BatchResult.of_body(request.custom_id, reply)


async def _report(totals: Totals, progress: Progress) -> None:
    """Prints the counts now and then if there is no bar."""
    of_all = "" if progress.num_requests is None else f"of {progress.num_requests}: "
    while progress.bar_columns is None:
        await asyncio.sleep(REPORT_INTERVAL_S)
        print(f"{of_all}{totals.describe()}", file=sys.stderr, flush=True)
