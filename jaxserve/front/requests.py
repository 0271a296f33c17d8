"""One request for text, and the completions that it becomes.

Every API builds a `GenerateRequest`. `resolve` checks it against the model, normalises it once, and
returns a `CompletionTask` for each completion: a `Submit` for the engine, and the data with which
the front turns tokens into text. No later code of the front changes a parameter.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.core.request import check_length
from jaxserve.errors import InvalidRequestError
from jaxserve.front.metrics import RequestRecord
from jaxserve.front.served_model import ServedModel
from jaxserve.ipc.messages import Submit
from jaxserve.ipc.parameters import checked_arguments
from jaxserve.parsing.parser import MessageParser
from jaxserve.sampling_params import INT64, SamplingParams, check_ids

SIZE_OF_COMPLETION = 50
"""The size of a completion: as many token IDs are checked in the time that it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for ``params.n`` completions of each prompt.

    Completion ``j`` of prompt ``i`` has the index ``i * params.n + j``, and the seed
    ``params.seed + j`` if there is one.

    Attributes:
      prompts: token IDs of each prompt.
      params: sampling parameters of every completion. ``max_tokens`` None: the default length, cut
        to the rest of the context.
      request_id: becomes part of the IDs that the engine sees; need not be unique.
      priority: smaller is scheduled earlier under the priority policy; 64 bits, signed.
      cache_salt: only requests with the same salt share cached prompt blocks.
      default_max_tokens: the default length of a completion; None: the default of the model.
      prompt_field: the field of the API that an error about a prompt names.
      length_field: the field of the API that an error about the requested length names.
      parsers: one for each completion; empty: the text is not parsed.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    default_max_tokens: int | None = None
    prompt_field: str = "prompt"
    length_field: str = "max_tokens"
    parsers: tuple[MessageParser, ...] = ()

    @property
    def num_completions(self) -> int:
        """The number of completions that the request asks for, over all prompts."""
        return len(self.prompts) * self.params.n

    @property
    def size(self) -> int:
        """The work of checking it: all token IDs, and something for each completion."""
        params = self.params
        ids = [*map(len, self.prompts), *map(len, params.bad_words_token_ids)]
        ids += [len(params.logit_bias or ()), len(params.allowed_token_ids or ())]
        return sum(ids) + SIZE_OF_COMPLETION * self.num_completions


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """One completion to generate.

    Attributes:
      index: which completion of its request.
      submit: the message to the engine. It has no stop strings: the engine sees token IDs only.
      params: sampling parameters of the request, with its stop strings.
      record: the times and counts of this completion.
      parser: turns the text into events; None: the text is not parsed.
    """

    index: int
    submit: Submit
    params: SamplingParams
    record: RequestRecord
    parser: MessageParser | None


def resolve(
    request: GenerateRequest, model: ServedModel, *, arrival_s: float
) -> list[CompletionTask]:
    """Checks a request against the model and returns its completions, in order of their index.

    Args:
      request: the request to check.
      model: the model that runs the request.
      arrival_s: when the request arrived, on the monotonic clock.

    Raises:
      ContextLengthError: a prompt, or a prompt with the requested length, does not fit.
      InvalidRequestError: a token ID, a count of log probabilities, a parameter of a stage or the
        priority is out of range.
    """
    params, ready = request.params, model.ready
    params.check_token_ids(ready.vocab_size)
    params = params.within_logprobs(ready.max_logprobs, ready.vocab_size)
    if not INT64[0] <= request.priority <= INT64[1]:
        raise InvalidRequestError(
            f"priority must be between {INT64[0]} and {INT64[1]}, got {request.priority}",
            param="priority",
        )
    normalised = params.normalised().with_valid(
        extra_args=checked_arguments(
            params.extra_args, ready.parameters, ready.vocab_size, field="extra_args"
        ),
    )
    shared = _engine_params(normalised, model)
    base = f"{request.request_id}-{uuid.uuid4().hex[:12]}"
    tasks: list[CompletionTask] = []
    for i, prompt_ids in enumerate(request.prompts):
        _check_prompt(request, i, model)
        max_tokens = _max_tokens(request, len(prompt_ids), model)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({max_tokens}), got {params.min_tokens}",
                param="min_tokens",
            )
        for sample in range(params.n):
            index = len(tasks)
            submit = Submit(
                f"{base}-{index}",
                prompt_ids,
                shared.for_completion(_seed(params, sample), max_tokens),
                eos_token_id=None if params.ignore_eos else model.tokenizer.eos_token_id,
                priority=request.priority,
                arrival_s=arrival_s,
                cache_salt=request.cache_salt,
            )
            length = max_tokens if params.pooling is None else 0
            record = RequestRecord(arrival_s, len(prompt_ids), length, params.n)
            parser = request.parsers[index] if request.parsers else None
            tasks.append(CompletionTask(index, submit, params, record, parser))
    return tasks


def _check_prompt(request: GenerateRequest, i: int, model: ServedModel) -> None:
    """Raises an error that names the field of the API unless prompt ``i`` can run."""
    field, prompt_ids, ready = request.prompt_field, request.prompts[i], model.ready
    path = field if len(request.prompts) == 1 else f"{field}[{i}]"
    try:
        check_length(len(prompt_ids), request.params.most_tokens, max_model_len=ready.max_model_len)
        check_ids(prompt_ids, ready.vocab_size, param=path)
    except InvalidRequestError as error:
        which = "" if path in (field, error.param) else f"{path}: "
        param = request.length_field if error.param == "max_tokens" else field
        raise type(error)(which + error.message, param=param) from error


def _max_tokens(request: GenerateRequest, num_prompt_tokens: int, model: ServedModel) -> int:
    """Returns the requested length, else the default length cut to the rest of the context.

    Raises InvalidRequestError if ``min_tokens`` exceeds that default.
    """
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    room = model.max_model_len - num_prompt_tokens
    default = request.default_max_tokens
    if default is None:
        default = model.defaults.max_tokens
    length = room if default is None else min(default, room)
    if request.params.min_tokens > length:
        raise InvalidRequestError(
            f"min_tokens must be at most the default length of a completion here ({length}), got "
            f"{request.params.min_tokens}",
            param="min_tokens",
        )
    return length


def _seed(params: SamplingParams, sample: int) -> int:
    """Returns the seed of one completion, with 64 bits and a sign."""
    seed = random.getrandbits(63) if params.seed is None else params.seed + sample
    return (seed + 2**63) % 2**64 - 2**63


def _engine_params(params: SamplingParams, model: ServedModel) -> SamplingParams:
    """Returns the parameters that all completions of a request share in the engine."""
    stop_ids = params.stop_token_ids
    if model.extra_end_ids and not params.ignore_eos:
        stop_ids = tuple(dict.fromkeys(stop_ids + model.extra_end_ids))
    return params.with_valid(n=1, stop=(), stop_token_ids=stop_ids)
