"""The messages between an engine process and its readers, and their encoding.

A *reader* receives the events of an engine. Reader 0 started the engine process: it is the front,
or the main process of a server with several fronts. Each of these fronts is a reader with a number
from 1, and no number is used twice.

Messages are msgpack arrays with a tag. Nothing is pickled, and no message carries arrays or jax
types. Times are seconds of `time.monotonic`, which on Linux all processes of a machine share.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from jaxserve.ipc.parameters import Parameter
from jaxserve.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended. The API uses the lower-case names."""

    STOP = 0  # an end token, a stop token ID or a stop string
    LENGTH = 1  # max_tokens or the end of the context
    ABORT = 2  # the client disconnected, or aborted the request
    ERROR = 3  # the engine could not continue with this request


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True, gc=False):
    """Runs one request.

    Attributes:
      request_id: unique among the requests in flight. Those of reader r > 0 begin with ``r:`` (see
        `wire_id`).
      prompt_token_ids: at least one ID, each in ``[0, Ready.vocab_size)``.
      params: ``seed`` is set and ``n`` is 1. ``stop_token_ids`` includes the end tokens of the
        model besides ``eos_token_id``.
      eos_token_id: ends the request without a stop reason. None if the model has no end token, or
        if the request ignores it.
      priority: lowest first, under the priority policy.
      arrival_s: when the request reached the front.
      cache_salt: only requests with the same salt share cached prefixes.
      num_prior_tokens: > 0 resubmits a request after its engine died: that many of the last
        ``prompt_token_ids`` are output of the dead engine. They count as output for limits,
        penalties and random numbers.
      num_crashes: deaths of engines that may have run it. If > 0, the answer is `Received`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_id: int | None = None
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str = ""
    num_prior_tokens: int = 0
    num_crashes: int = 0


class BadSubmit(msgspec.Struct, frozen=True, gc=False):
    """A `Submit` that arrived and is not valid, with the reason. Never sent itself."""

    request_id: str
    reason: str


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True, gc=False):
    """Ends requests and frees their rows and blocks. The engine ignores unknown IDs."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True, gc=False):
    """Ends the process. The engine drops requests in flight, so the front drains first."""


class AddReader(msgspec.Struct, tag="add-reader", array_like=True, frozen=True, gc=False):
    """Sends events to one more reader, which has bound the socket ``address`` before.

    It is the first message of the reader. Once an engine has had other readers, reader 0 sends no
    `Submit`: the IDs of its requests would not tell whose they are.
    """

    reader: int
    address: str


class RemoveReader(msgspec.Struct, tag="remove-reader", array_like=True, frozen=True, gc=False):
    """Aborts the requests of a reader and closes its socket.

    The reader itself sends it, or reader 0 when the reader is dead. The engine drops what still
    arrives from it.
    """

    reader: int


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True, gc=False):
    """Progress of a phase of the start-up.

    Attributes:
      engine: index of the engine.
      phase: name of the phase.
      done, total: amounts in ``unit``; total 0 if unknown.
      unit: the unit of the amounts, such as "bytes" or "programs".
      detail: a short remark for people.
      seconds: duration of the phase once it has ended, else None.
    """

    engine: int
    phase: str
    done: float
    total: float
    unit: str
    detail: str = ""
    seconds: float | None = None


class Decision(NamedTuple):
    """A setting that was resolved at start-up: its name, its value and the reason. For people."""

    what: str
    value: str
    why: str


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True, gc=False):
    """The engine can serve. Carries its resolved settings.

    Attributes:
      engine: index of the engine.
      max_model_len: the most tokens of one request, prompt and output together.
      vocab_size: token IDs are in ``[0, vocab_size)``.
      block_size: slots in a block of the KV cache.
      num_blocks: blocks in the KV cache, including block 0, which no request ever holds.
      max_num_seqs: the most requests that run at the same time.
      max_num_batched_tokens: the most tokens in one step.
      decisions: the settings that were resolved, with reasons.
      hidden_size: length of the vectors of `SamplingParams.pooling`.
      max_logprobs: the largest `SamplingParams.logprobs` that the engine serves.
      parameters: the parameters that `SamplingParams.extra_args` may have.
      fingerprint: differs if the files of the model do; "" if there are none.
    """

    engine: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decisions: list[Decision]
    hidden_size: int = 0
    max_logprobs: int = 20
    parameters: tuple[Parameter, ...] = ()
    fingerprint: str = ""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities at one position.

    The numbers are in tuples because Python's collector of garbage soon leaves those alone. Lists
    of a million numbers would take it 20 ms, in which the whole process stands still.

    Attributes:
      token_ids: 1 + k IDs: the token at this position, then the k most likely ones.
      logprobs: aligned with ``token_ids``.
      rank: rank of the token at this position; 1 is the most likely.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class RequestOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The output that one step added to a request.

    Attributes:
      request_id: the request.
      token_ids: new output tokens.
      finish_reason: a `FinishReason`, or None if the request continues.
      stop_reason: the stop token ID that ended the request; None for the end token and for every
        other reason.
      logprobs: one entry for each new token, if requested.
      num_cached_tokens: prompt tokens that the prefix cache provided.
      scheduled_s: when the request first ran.
      prompt_logprobs: with the first token, if requested: entry i belongs to prompt token i, and
        entry 0 is None.
      embedding: the vector of a request with `SamplingParams.pooling`, not normalised. Such a
        request has exactly one output, without tokens and with reason STOP.
      error: why the engine could not continue, with the finish reason ERROR. For the user.
      is_user_error: whether the request is at fault, because of its grammar, and not the engine.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: int | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    scheduled_s: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: tuple[float, ...] | None = None
    error: str | None = None
    is_user_error: bool = False


class StepStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The state of an engine after a step. Counts named ``total`` only grow.

    Attributes:
      num_running, num_waiting: requests that run, and that wait to run.
      kv_usage: used blocks as a fraction of all blocks except block 0, 0 to 1.
      total_steps, total_preemptions: counts since the start.
      total_prompt_tokens: a prompt counts once, when its first output token is sampled.
      total_generation_tokens: output tokens.
      total_compilations: programs compiled since the start; after warm-up only rare ones are added.
      prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache, and found.
      num_step_tokens: tokens of the step that has just ended; 0 if none has. Heartbeats repeat it.
      total_drafts: steps of requests for which drafts were proposed.
      total_draft_tokens: drafts that were proposed.
      total_restarts: restarts of the process; the front counts them.
      accepted_per_position: drafts that were accepted, as the first, second, ... of their step;
        empty without speculation.
      total_corrupted: requests that ended because numbers of the model were not finite; 0 with
        ``--on-nonfinite ignore``.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    total_steps: int = 0
    total_preemptions: int = 0
    total_prompt_tokens: int = 0
    total_generation_tokens: int = 0
    total_compilations: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_step_tokens: int = 0
    total_drafts: int = 0
    total_draft_tokens: int = 0
    total_restarts: int = 0
    accepted_per_position: tuple[int, ...] = ()
    total_corrupted: int = 0


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True, gc=False):
    """The outputs of one step, and the state after it. Without outputs, a heartbeat.

    Attributes:
      engine: index of the engine.
      outputs: those of the requests of this reader, with the IDs that the reader knows.
      stats: the state of the engine.
      num_submits: requests of this reader that the engine has handled since its start.
      num_other_submits: the same for all other readers.
    """

    engine: int
    outputs: list[RequestOutput]
    stats: StepStats
    num_submits: int = 0
    num_other_submits: int = 0


class Arrived(msgspec.Struct, tag="arrived", array_like=True, frozen=True, gc=False):
    """Other readers have sent requests. Goes to fronts only, while the engine runs a step.

    Attributes:
      engine: index of the engine.
      num_other_submits: requests of all other readers that have arrived since the engine started.
    """

    engine: int
    num_other_submits: int


class Received(msgspec.Struct, tag="received", array_like=True, frozen=True, gc=False):
    """A request that was in a crash before has arrived. Sent before the engine handles it."""

    request_id: str


class EngineFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True, gc=False):
    """The engine is about to exit because of an exception.

    Attributes:
      engine: index of the engine.
      message: the message of the exception.
      traceback: the formatted traceback, for the log.
      is_user_error: whether a user can fix the cause, so that ``message`` is enough.
      error_type: class name of the exception.
      running_ids: the requests that were running.
    """

    engine: int
    message: str
    traceback: str
    is_user_error: bool
    error_type: str = ""
    running_ids: tuple[str, ...] = ()


EngineRequest = Submit | Abort | Shutdown | AddReader | RemoveReader
EngineEvent = Progress | Ready | StepOutputs | Arrived | Received | EngineFailed


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(EngineRequest)
_event_decoder = msgspec.msgpack.Decoder(EngineEvent)


def encode(message: EngineRequest | EngineEvent) -> bytes:
    """Encodes a message in either direction."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> EngineRequest:
    """Decodes a valid `EngineRequest`.

    Raises msgspec.DecodeError, msgspec.ValidationError or InvalidRequestError.
    """
    return _request_decoder.decode(data)


def decode_event(data: bytes) -> EngineEvent:
    """Decodes an `EngineEvent`. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _event_decoder.decode(data)
