"""Random messages of an engine, for property tests of their encoding."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxserve.ipc import messages as m

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPROBS = st.builds(
    m.TokenLogprobs, IDS.map(tuple), st.lists(FINITE).map(tuple), st.integers(1, 10**6)
)
OUTPUT = st.builds(
    m.RequestOutput,
    st.text(),
    IDS,
    finish_reason=st.none() | st.sampled_from(m.FinishReason).map(int),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=3),
    embedding=st.none() | st.lists(FINITE, max_size=9).map(tuple),
)
STATS = st.builds(m.StepStats, num_running=st.integers(0, 1000), kv_usage=st.floats(0, 1))
COUNT = st.integers(0, 10**6)
EVENT = (
    st.builds(m.StepOutputs, st.integers(0, 9), st.lists(OUTPUT, max_size=3), STATS, COUNT, COUNT)
    | st.builds(m.Arrived, st.integers(0, 9), COUNT)
    | st.builds(m.Received, st.text())
    | st.builds(m.Progress, st.integers(0, 9), st.text(), FINITE, FINITE, st.text())
    | st.builds(m.EngineFailed, st.integers(0, 9), st.text(), st.text(), st.booleans())
    | st.builds(
        m.Ready,
        *[st.integers(0, 10**6)] * 7,
        st.lists(st.builds(m.Decision, st.text(), st.text(), st.text()), max_size=3),
        st.integers(0, 100),
    )
)
