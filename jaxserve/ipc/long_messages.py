"""Encodes and decodes long messages in little time, or in parts.

A call that encodes or decodes stops all threads of the front. The messages are those of
`ipc.messages`, byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import msgspec

from jaxserve.ipc.messages import (
    EngineEvent,
    RequestOutput,
    StepOutputs,
    StepStats,
    Submit,
    TokenLogprobs,
    decode_event,
    encode,
)
from jaxserve.sampling_params import SamplingParams

MIN_SHARED = 64
"""Collections with fewer items are encoded anew for each completion: that takes less time."""


class _LongStep(msgspec.Struct, tag="outputs", array_like=True, frozen=True, gc=False):
    """The form of `StepOutputs` in which a long one is decoded first."""

    engine: int
    outputs: list[msgspec.Raw]
    stats: StepStats
    num_submits: int = 0
    num_other_submits: int = 0


PART_BYTES = 1 << 16
"""The size of a part of a long event: so many bytes of prompt log probabilities, but at least one
position. With the whole vocabulary, a position can have a million bytes."""

_PROMPT_LOGPROBS = RequestOutput.__struct_fields__.index("prompt_logprobs")
_NIL = msgspec.Raw(b"\xc0")

_encoder = msgspec.msgpack.Encoder()
_step_decoder = msgspec.msgpack.Decoder(_LongStep)
_output_decoder = msgspec.msgpack.Decoder(RequestOutput)
_raw_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw] | None)
_position_decoder = msgspec.msgpack.Decoder(TokenLogprobs | None)


class SubmitEncoder:
    """Encodes requests as `encode` does, but a large collection of successive requests only once.

    The completions of a request share their collections: the same prompt, biases and so on. The
    encoder keeps those of the last request, and finds them by identity.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Any, msgspec.Raw]] = {}

    def encode(self, submit: Submit) -> bytes:
        """Encodes a request."""
        params = submit.params
        prompt, large = submit.prompt_token_ids, _large_fields(params)
        if not large and len(prompt) < MIN_SHARED:
            self._last = {}
            return encode(submit)
        before, self._last = self._last, {}
        wire = copy.copy(submit)
        msgspec.structs.force_setattr(wire, "prompt_token_ids", self._raw(prompt, before))
        if large:
            wire_params = copy.copy(params)
            for name in large:
                raw = self._raw(getattr(params, name), before)
                msgspec.structs.force_setattr(wire_params, name, raw)
            msgspec.structs.force_setattr(wire, "params", wire_params)
        return encode(wire)

    def _raw(self, value: Any, before: dict[int, tuple[Any, msgspec.Raw]]) -> msgspec.Raw:
        known = before.get(id(value))
        # The entry keeps its value alive, so an ID stands for one value.
        entry = (value, msgspec.Raw(_encoder.encode(value))) if known is None else known
        self._last[id(value)] = entry
        return entry[1]


def _large_fields(params: SamplingParams) -> list[str]:
    """Returns the names of fields that hold large collections."""
    names: list[str] = []
    if params.logit_bias is not None and len(params.logit_bias) >= MIN_SHARED:
        names.append("logit_bias")
    if params.allowed_token_ids is not None and len(params.allowed_token_ids) >= MIN_SHARED:
        names.append("allowed_token_ids")
    if len(params.bad_words_token_ids) >= MIN_SHARED:
        names.append("bad_words_token_ids")
    if params.grammar is not None:
        names.append("grammar")
    return names


def decode_event_in_parts(data: bytes) -> Generator[None, None, EngineEvent]:
    """Decodes a message from an engine, and yields between parts that take few milliseconds.

    Only the log probabilities of prompts are divided: nothing else makes an event long.

    Raises msgspec.DecodeError or msgspec.ValidationError unless it is an `EngineEvent`.
    """
    if data[1:9] != b"\xa7outputs":  # a list, whose first item is the tag
        return decode_event(data)
    step = _step_decoder.decode(data)
    outputs: list[RequestOutput] = []
    for raw in step.outputs:
        yield
        fields = _raw_list_decoder.decode(raw) or []
        yield
        raw_positions = _raw_list_decoder.decode(fields[_PROMPT_LOGPROBS])
        num_bytes = len(bytes(fields[_PROMPT_LOGPROBS]))
        fields[_PROMPT_LOGPROBS] = _NIL
        yield
        output = _output_decoder.decode(_encoder.encode(fields))
        if raw_positions is not None:
            positions: list[TokenLogprobs | None] = []
            # All positions are about equally long.
            at_once = max(PART_BYTES * len(raw_positions) // num_bytes, 1)
            for start in range(0, len(raw_positions), at_once):
                yield
                part = raw_positions[start : start + at_once]
                positions += map(_position_decoder.decode, part)
            output = msgspec.structs.replace(output, prompt_logprobs=positions)
        outputs.append(output)
    return StepOutputs(step.engine, outputs, step.stats, step.num_submits, step.num_other_submits)
