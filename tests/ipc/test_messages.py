"""The wire format: each side decodes what the other encodes, and rejects everything else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.ipc import messages as m
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.testing.random_messages import EVENT, FINITE, IDS

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 10**6),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=IDS.map(tuple),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), FINITE, max_size=3),
    bad_words_token_ids=st.lists(IDS.filter(len).map(tuple), max_size=3).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["regex", "choice"]), st.text()),
)
SUBMIT = st.builds(
    m.Submit,
    st.text(),
    IDS,
    PARAMS,
    st.none() | st.integers(0, 10**6),
    num_crashes=st.integers(0, 9),
)
REQUEST = (
    SUBMIT
    | st.builds(m.Abort, st.lists(st.text()))
    | st.just(m.Shutdown())
    | st.builds(m.AddReader, st.integers(1, 99), st.text())
    | st.builds(m.RemoveReader, st.integers(1, 99))
)


@given(REQUEST)
def test_decoding_reverses_the_encoding_of_requests(message: m.EngineRequest) -> None:
    assert m.decode_request(m.encode(message)) == message


@given(EVENT)
def test_decoding_reverses_the_encoding_of_events(message: m.EngineEvent) -> None:
    assert m.decode_event(m.encode(message)) == message


@given(st.binary(max_size=200))
def test_rejects_random_bytes(data: bytes) -> None:
    for decode in (m.decode_request, m.decode_event):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            decode(data)


def test_each_direction_rejects_messages_of_the_other() -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_event(m.encode(m.Shutdown()))
    with pytest.raises(msgspec.ValidationError):
        m.decode_request(m.encode(m.EngineFailed(0, "", "", False)))


def test_rejects_a_field_of_the_wrong_type() -> None:
    wire = msgspec.msgpack.encode(["submit", "id", ["not an id"], {}])
    with pytest.raises(msgspec.ValidationError):
        m.decode_request(wire)


def test_decoding_checks_sampling_params() -> None:
    wire = msgspec.msgpack.encode(["submit", "id", [1], {"temperature": -1.0}])
    with pytest.raises(InvalidRequestError, match="temperature"):
        m.decode_request(wire)


def test_finish_reasons_have_the_names_of_the_api() -> None:
    assert [reason.name.lower() for reason in m.FinishReason] == [
        "stop",
        "length",
        "abort",
        "error",
    ]


def test_the_message_of_a_step_with_many_requests_is_small() -> None:
    outputs = [m.RequestOutput(f"request-{i}", [12345]) for i in range(64)]
    assert len(m.encode(m.StepOutputs(0, outputs, m.StepStats()))) < 64 * 40
