"""Long messages are the same as short ones, and take several short calls."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.ipc import long_messages
from jaxserve.ipc import messages as m
from jaxserve.ipc.long_messages import PART_BYTES, SubmitEncoder, decode_event_in_parts
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.testing.random_messages import EVENT


def decoded(data: bytes) -> tuple[m.EngineEvent, int]:
    """Returns the event and the number of parts in which it was decoded."""
    parts = decode_event_in_parts(data)
    num_parts = 1
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value, num_parts
        num_parts += 1


@given(EVENT)
def test_an_event_that_is_decoded_in_parts_is_the_same(message: m.EngineEvent) -> None:
    assert decoded(m.encode(message))[0] == message


def test_the_parts_of_a_long_event_are_short() -> None:
    scores = [None, *(m.TokenLogprobs((i, i + 1), (-1.0, -2.0), 1) for i in range(5000))]
    outputs = [m.RequestOutput(f"r{i}", [1], prompt_logprobs=list(scores)) for i in range(3)]
    event = m.StepOutputs(1, outputs, m.StepStats(num_running=3))
    result, num_parts = decoded(m.encode(event))
    assert result == event
    assert num_parts > len(m.encode(event)) / PART_BYTES


def test_a_part_has_one_position_if_those_are_long() -> None:
    entry = m.TokenLogprobs(tuple(range(50_000)), (-1.5,) * 50_000, 1)
    output = m.RequestOutput("r", [1], prompt_logprobs=[None, *[entry] * 4])
    event = m.StepOutputs(1, [output], m.StepStats(num_running=1))
    result, num_parts = decoded(m.encode(event))
    assert result == event
    assert num_parts >= 5


@given(st.binary(max_size=200))
def test_parts_of_random_bytes_are_rejected(data: bytes) -> None:
    for prefix in (b"", b"\x94\xa7outputs"):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            decoded(prefix + data)


LARGE_PARAMS = st.builds(
    SamplingParams,
    logit_bias=st.none() | st.sampled_from([dict.fromkeys(range(100), 1.0), {1: 2.0}]),
    allowed_token_ids=st.none() | st.just(tuple(range(200))),
    bad_words_token_ids=st.sampled_from([(), tuple((i, i + 1) for i in range(100))]),
    max_tokens=st.integers(1, 9),
)
PROMPTS = st.sampled_from([[1], list(range(100)), list(range(500, 700))])


@given(st.lists(st.builds(m.Submit, st.text(), PROMPTS, LARGE_PARAMS), max_size=6))
def test_an_encoder_of_many_requests_writes_the_same_bytes(submits: list[m.Submit]) -> None:
    encoder = SubmitEncoder()
    for submit in submits:
        assert encoder.encode(submit) == m.encode(submit)
        completion = msgspec.structs.replace(
            submit, params=submit.params.for_completion(7, submit.params.max_tokens or 1)
        )
        assert encoder.encode(completion) == m.encode(completion)


def test_the_completions_of_a_request_share_what_is_large(monkeypatch) -> None:
    """A grammar counts as large whatever its length: its text is encoded, not compared."""
    encoded = []

    class Counting:
        def encode(self, value):
            encoded.append(value)
            return msgspec.msgpack.encode(value)

    shared = SamplingParams(
        logit_bias=dict.fromkeys(range(1000), 1.0), grammar=Grammar("regex", "a" * 1000)
    )
    prompt = list(range(1000))
    monkeypatch.setattr(long_messages, "_encoder", Counting())
    encoder = SubmitEncoder()
    for i in range(50):
        encoder.encode(m.Submit(str(i), prompt, shared.for_completion(i, 5)))
    assert sum(value is prompt for value in encoded) == 1
    assert sum(value is shared.logit_bias for value in encoded) == 1
    assert sum(value is shared.grammar for value in encoded) == 1
    resumed = m.Submit("r", [*prompt, 5], shared.for_completion(1, 5), num_prior_tokens=1)
    assert m.decode_request(encoder.encode(resumed)) == resumed
    encoder.encode(m.Submit("small", [1], SamplingParams()))
    assert encoder._last == {}
