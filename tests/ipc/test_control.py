"""The messages between the main process and a front."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.ipc.control import EngineDown, EnginesGone, EngineUp
from jaxserve.ipc.messages import Decision, Ready, StepStats

READY = st.builds(
    Ready,
    *[st.integers(0, 10**6)] * 7,
    st.lists(st.builds(Decision, st.text(), st.text(), st.text()), max_size=3),
)
STATS = st.builds(
    StepStats,
    total_restarts=st.integers(0, 9),
    accepted_per_position=st.lists(st.integers(0, 9)).map(tuple),
)
MESSAGE = (
    st.builds(EngineUp, st.integers(0, 9), st.text(), st.text(), READY, STATS)
    | st.builds(EngineDown, st.integers(0, 9), st.text(), st.none() | st.lists(st.text()))
    | st.builds(EnginesGone, st.text())
)


@given(MESSAGE)
def test_decoding_reverses_the_encoding(message):
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=EngineUp | EngineDown | EnginesGone) == message


def test_rejects_a_field_of_the_wrong_type():
    data = msgspec.msgpack.encode(["engine-down", 1, "dead", [3]])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=EngineUp | EngineDown | EnginesGone)
