"""Runs the prompts of a call: all of them are checked first, and each fails alone."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeAlias

from tqdm import tqdm

from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError
from jaxserve.front.concurrency import bounded_as_completed
from jaxserve.front.outputs import Delta
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.text_engine import TextEngine
from jaxserve.llm.outputs import CompletionOutput, LLMOutput, collect
from jaxserve.program.stderr import ProgressOutput
from jaxserve.sampling_params import SamplingParams

Encoded: TypeAlias = tuple[str | None, list[int]]
"""A prompt: its string, or None if the caller gave token IDs, and its token IDs."""

logger = logging.getLogger(__name__)


async def answer_prompts(
    text_engine: TextEngine,
    prompts: list[Encoded],
    params: list[SamplingParams],
    outputs: list[LLMOutput],
    *,
    use_tqdm: bool,
) -> None:
    """Runs prompts, each with its parameters.

    Args:
      text_engine: runs the prompts.
      prompts: the prompts in order.
      params: their parameters.
      outputs: an empty list. Gets an output for each prompt, which is filled as the prompt runs: a
        caller has what is there when this ends in whichever way.
      use_tqdm: show a progress bar.

    Raises:
      InvalidRequestError: a prompt or its parameters are invalid. No prompt has run then.
      EngineDeadError: the engine failed; the outputs that it did not finish have this error.
    """
    await _check_grammars(text_engine, params)
    deltas = [
        _accept(text_engine, i, len(prompts), GenerateRequest(prompts=[ids], params=p))
        for i, ((_, ids), p) in enumerate(zip(prompts, params, strict=True))
    ]
    for (text, ids), p in zip(prompts, params, strict=True):
        outputs.append(LLMOutput(text, ids, [CompletionOutput(j) for j in range(p.n)]))
    deaths: list[EngineDeadError] = []

    async def answer(i: int) -> LLMOutput:
        try:
            await collect(deltas[i], outputs[i], text_engine.model.tokenizer)
        except EngineDeadError as error:
            deaths.append(error)
            outputs[i].fail(str(error))
        except Exception as error:
            # Whatever fails one request must not take the answers of the others.
            cause = None if isinstance(error, JaxserveError) else error
            logger.error("prompt %d failed: %s", i, error, exc_info=cause)
            outputs[i].fail(str(error) or type(error).__name__)
        return outputs[i]

    # Enough prompts in flight that no row waits for the next prompt.
    limit = 2 * text_engine.engine.ready.max_num_seqs
    num_tokens = 0
    with _bar(len(outputs), use_tqdm) as bar:
        answers = bounded_as_completed(range(len(outputs)), answer, limit=limit)
        async with aclosing(answers):
            async for output in answers:
                num_tokens += sum(len(o.token_ids) for o in output.outputs)
                rate = num_tokens / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
                bar.update()
    if deaths:
        raise deaths[0]


def _bar(total: int, use_tqdm: bool) -> tqdm:
    return tqdm(
        total=total,
        desc="Processed prompts",
        disable=not use_tqdm,
        file=ProgressOutput(),
        dynamic_ncols=True,  # without it, only a bar on `sys.stderr` itself has the full width
    )


def _accept(
    text_engine: TextEngine, i: int, count: int, request: GenerateRequest
) -> AsyncGenerator[Delta, None]:
    """Checks request ``i`` of ``count``; nothing runs yet. Raises InvalidRequestError."""
    try:
        return text_engine.generate(request)
    except InvalidRequestError as error:
        raise _at(i, count, error) from error


async def _check_grammars(text_engine: TextEngine, params: list[SamplingParams]) -> None:
    """Checks each grammar once, before any reaches the engine. Raises InvalidRequestError."""
    first_uses = {p.grammar: i for i, p in reversed(list(enumerate(params)))}
    for grammar, i in first_uses.items():
        if grammar is None:
            continue
        try:
            await text_engine.grammars.check(grammar)
        except InvalidRequestError as error:
            named = InvalidRequestError(f"grammar: {error.message}", param="grammar")
            raise _at(i, len(params), named) from error


def _at(i: int, count: int, error: InvalidRequestError) -> InvalidRequestError:
    """Returns the error of request ``i`` of ``count``; its message has ``i`` if there are more."""
    which = f"prompt {i}: " if count > 1 else ""
    return type(error)(which + error.message, param=error.param)
