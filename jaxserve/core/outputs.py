"""Turns the result of a step into the outputs of its requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.plan import ScheduledRequest, StepResult
from jaxserve.core.request import Request, Status
from jaxserve.ipc.messages import FinishReason, RequestOutput, TokenLogprobs

NOT_FINITE = (
    "the model gave this request {} that are not finite numbers; its weights are damaged, or its "
    "activations overflow in this dtype"
)


def sampled_output(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
) -> RequestOutput:
    """Returns the output of a request that sampled these tokens, at least one."""
    if request.params.pooling is not None:
        return pooling_output(request)
    return append_tokens(request, token_ids, logprobs)


def failures(
    drafted: Sequence[tuple[Request, ScheduledRequest]], result: StepResult
) -> list[tuple[Request, RequestOutput]]:
    """Returns the requests that `StepResult.not_finite` ends, and their last outputs."""
    if not result.not_finite:
        return []
    ended = [r for r, _ in drafted if r.id in result.not_finite and r.status is not Status.FINISHED]
    return [(request, _not_finite_output(request)) for request in ended]


def _not_finite_output(request: Request) -> RequestOutput:
    return RequestOutput(
        request_id=request.id,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        scheduled_s=request.scheduled_s or 0.0,
        error=NOT_FINITE.format("logits" if request.params.pooling is None else "hidden states"),
    )


def append_tokens(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
) -> RequestOutput:
    """Appends sampled tokens to a request, up to the one that ends it; the rest is dropped.

    The first output of a request also has its prompt log probabilities.
    """
    prompt_logprobs = finish_reason = stop_reason = error = None
    if request.num_output_tokens == 0:
        prompt_logprobs = request.take_prompt_logprobs()
    for count, token_id in enumerate(token_ids, 1):
        finish_reason, stop_reason = request.append(token_id)
        if finish_reason is not None:
            token_ids = token_ids[:count]
            logprobs = None if logprobs is None else logprobs[:count]
            if finish_reason is FinishReason.ERROR and request.constraint is not None:
                error = request.constraint.error
            break
    return RequestOutput(
        request_id=request.id,
        token_ids=token_ids,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        logprobs=logprobs,
        scheduled_s=request.scheduled_s or 0.0,
        prompt_logprobs=prompt_logprobs,
        error=error,
        is_user_error=error is not None,
    )


def pooling_output(request: Request) -> RequestOutput:
    """Returns the output of a pooling request whose prompt has been computed."""
    return RequestOutput(
        request_id=request.id,
        token_ids=[],
        finish_reason=FinishReason.STOP,
        scheduled_s=request.scheduled_s or 0.0,
        embedding=request.embedding(),
    )


def add_prompt_logprobs(
    drafted: Sequence[tuple[Request, ScheduledRequest]], result: StepResult
) -> None:
    """Adds the prompt log probabilities of a step to their requests."""
    if not result.prompt_logprobs:
        return
    scoring = [pair for pair in drafted if pair[1].num_prompt_targets]
    for (request, scheduled), entries in zip(scoring, result.prompt_logprobs, strict=True):
        request.add_prompt_logprobs(scheduled.start, entries)


def add_pooled(drafted: Sequence[tuple[Request, ScheduledRequest]], result: StepResult) -> None:
    """Adds the pooled hidden states of a step to their requests."""
    if not result.pooled:
        return
    pooling = [pair for pair in drafted if pair[1].pools]
    for (request, scheduled), vector in zip(pooling, result.pooled, strict=True):
        request.add_pooled(scheduled.start, vector)
