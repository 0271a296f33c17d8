"""Counts that several processes share are those that one process would have counted."""

import os
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import QueueFullError
from jaxserve.front.admission import AdmissionLimit
from jaxserve.front.counts import BODY_BYTES, IN_FLIGHT, Counts, Gauge
from jaxserve.front.metrics import (
    FINISH_REASONS,
    GENERATION_TOKENS,
    Histogram,
    RequestMetrics,
    RequestRecord,
    StepMetrics,
)
from jaxserve.front.shared_counts import SharedCounts
from jaxserve.ipc.messages import StepOutputs, StepStats
from jaxserve.testing.waiting import wait_until

NUM_FRONTS, NUM_ENGINES = 3, 2
SIZES = {"num_fronts": NUM_FRONTS, "num_engines": NUM_ENGINES}


@pytest.fixture
def main() -> Iterator[SharedCounts]:
    with closing(SharedCounts.create(**SIZES)) as counts:
        yield counts


def front(main: SharedCounts, index: int) -> SharedCounts:
    """Returns the counts of a front process that starts."""
    return SharedCounts.attach(os.dup(main.fileno()), index=index, **SIZES)


def values(metrics: RequestMetrics) -> dict[str, object]:
    """Returns all numbers, with sums that do not depend on the order of the values."""

    def of(histogram: Histogram) -> tuple[list[int], float]:
        return histogram.counts, pytest.approx(histogram.sum)

    return {
        "finished": metrics.finished,
        "tokens": (metrics.prompt_tokens, metrics.cached_tokens, metrics.generation_tokens),
        "first": of(metrics.time_to_first_token),
        "between": of(metrics.inter_token_latency),
        "longest": of(metrics.max_generation_tokens),
        **{name: of(histogram) for name, histogram in metrics.by_request.items()},
    }


def total(counts: Counts) -> RequestMetrics:
    return RequestMetrics(1000, counts.totals())


FRONTS = st.integers(0, NUM_FRONTS - 1)
TOKENS = st.tuples(st.just("tokens"), FRONTS, st.integers(1, 3), st.floats(0, 50))
END = st.tuples(st.just("end"), FRONTS, st.sampled_from(FINISH_REASONS), st.floats(0, 50))
ADMIT = st.tuples(st.just("admit"), FRONTS, st.integers(1, 9))
RESTART = st.tuples(st.just("restart"), FRONTS)
STEP = st.tuples(st.just("step"), st.integers(0, NUM_ENGINES - 1), st.integers(1, 9000))


@given(st.lists(st.one_of(TOKENS, TOKENS, END, ADMIT, RESTART, STEP), max_size=60))
def test_the_sums_are_what_one_process_counts_and_restarts_go_on(events) -> None:
    """Each front runs one completion at a time."""
    alone = RequestMetrics(1000)
    step_sums = [0] * NUM_ENGINES
    now = 100.0

    def new_record() -> tuple[RequestRecord, RequestRecord]:
        first, second = (RequestRecord(now, 20, 50, 1, scheduled_s=now) for _ in range(2))
        return first, second

    with closing(SharedCounts.create(**SIZES)) as main:
        fronts = [front(main, i) for i in range(NUM_FRONTS)]
        metrics = [RequestMetrics(1000, counts.own) for counts in fronts]
        gauges = [Gauge(counts, IN_FLIGHT) for counts in fronts]
        admitted = [0] * NUM_FRONTS
        records = [new_record() for _ in range(NUM_FRONTS)]
        steps = StepMetrics(main.own)
        before = main.totals()
        for num_events, (kind, i, *args) in enumerate(events, 1):
            if kind == "tokens":
                count, seconds = args
                now += seconds
                for each, record in zip((metrics[i], alone), records[i], strict=True):
                    each.tokens_arrived(record, count, now)
            elif kind == "end":
                reason, seconds = args
                now += seconds
                for each, record in zip((metrics[i], alone), records[i], strict=True):
                    each.request_ended(record, reason, now)
                    each.max_generation_tokens.observe(record.num_generated)
                records[i] = new_record()
            elif kind == "admit":
                admitted[i] += args[0]
                gauges[i].add(args[0])
            elif kind == "step":
                step_sums[i] += args[0]
                stats = StepStats(total_steps=num_events, num_step_tokens=args[0])
                steps.step_done(StepOutputs(i, [], stats))
            else:
                fronts[i] = front(main, i)
                metrics[i] = RequestMetrics(1000, fronts[i].own)
                gauges[i] = Gauge(fronts[i], IN_FLIGHT)
                admitted[i] = 0
                records[i] = new_record()
            after = main.totals()
            assert all(a <= b for a, b in zip(before[2:], after[2:], strict=True)), "counters fall"
            before = after
        for counts in (main, *fronts):
            assert values(total(counts)) == values(alone)
            assert counts.total(IN_FLIGHT) == sum(admitted)
            read = StepMetrics(counts.totals()).step_tokens
            assert [read[engine].sum for engine in range(NUM_ENGINES)] == step_sums
        assert [gauge.own for gauge in gauges] == admitted


def test_the_gauges_of_a_front_that_ended_count_no_longer(main) -> None:
    first, second = front(main, 0), front(main, 1)
    for counts, number in ((first, 3), (second, 4)):
        Gauge(counts, IN_FLIGHT).add(number)
        Gauge(counts, BODY_BYTES).add(100 * number)
    assert (main.total(IN_FLIGHT), main.total(BODY_BYTES)) == (7, 700)
    main.clear_gauges(0)
    assert (main.total(IN_FLIGHT), main.total(BODY_BYTES)) == (4, 400)
    front(main, 1)
    assert (main.total(IN_FLIGHT), main.total(BODY_BYTES)) == (0, 0)


def test_the_admission_limit_is_that_of_all_fronts(main) -> None:
    limits = [AdmissionLimit(5, in_flight=Gauge(front(main, i), IN_FLIGHT)) for i in range(2)]
    first = limits[0].admit(3)
    with pytest.raises(QueueFullError, match="3 completions are in flight .* at most 5"):
        limits[1].admit(3)
    second = limits[1].admit(2)
    assert [limit.num_in_flight for limit in limits] == [5, 5]
    first.release_one()
    with limits[1].admit(1), pytest.raises(QueueFullError):
        limits[0].admit(1)
    first.release()
    second.release()
    assert [limit.num_in_flight for limit in limits] == [0, 0]


def test_the_memory_of_a_server_is_small() -> None:
    with closing(SharedCounts.create(num_fronts=1, num_engines=1)) as counts:
        assert os.fstat(counts.fileno()).st_size <= 8192


def test_counts_of_another_server_are_no_counts_of_this_one(main) -> None:
    descriptor = os.dup(main.fileno())
    with pytest.raises(AssertionError, match="the counts of another server"):
        SharedCounts.attach(descriptor, index=0, num_fronts=NUM_FRONTS + 1, num_engines=1)
    os.close(descriptor)
    with pytest.raises(AssertionError, match="part 4 of 4"):
        SharedCounts.attach(main.fileno(), index=4, **SIZES)


def test_close_leaves_the_counts_readable(main) -> None:
    main.own[GENERATION_TOKENS] = 5
    main.close()
    main.close()
    assert main.total(GENERATION_TOKENS) == 5
    with pytest.raises(AssertionError, match="closed"):
        main.fileno()


PROGRAM = """
import sys
from jaxserve.front.counts import IN_FLIGHT, Gauge
from jaxserve.front.metrics import RequestMetrics, RequestRecord
from jaxserve.front.shared_counts import SharedCounts

counts = SharedCounts.attach(int(sys.argv[1]), index=1, num_fronts=3, num_engines=2)
"""


@contextmanager
def process(main: SharedCounts, program: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a front process with index 1, until the end of the block. It prints a line first."""
    descriptor = main.fileno()
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(program), str(descriptor)]
    with subprocess.Popen(
        command, pass_fds=(descriptor,), stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


COUNT_FOR_EVER = """
    Gauge(counts, IN_FLIGHT).add(4)
    metrics = RequestMetrics(1000, counts.own)
    record = RequestRecord(1.0, 20, 50, 1)
    print("ready", flush=True)
    while True:
        metrics.tokens_arrived(record, 1, record.last_token_s + 1.0)
"""


def test_a_front_that_is_killed_leaves_counts_that_its_successor_continues(main) -> None:
    other = front(main, 0)
    with process(main, COUNT_FOR_EVER) as child:
        wait_until(lambda: total(other).generation_tokens > 1000)
        assert other.total(IN_FLIGHT) == 4
        child.send_signal(signal.SIGKILL)
        child.wait()
    left = total(other)
    count = left.generation_tokens
    assert sum(left.time_to_first_token.counts) == 1
    # At most one token was half counted.
    assert count - 1 <= sum(left.inter_token_latency.counts) <= count
    assert count - 2 <= left.inter_token_latency.sum <= count
    successor = front(main, 1)
    assert successor.total(IN_FLIGHT) == 0
    assert values(total(successor)) == values(left)
    RequestMetrics(1000, successor.own).tokens_arrived(RequestRecord(1.0, 20, 50, 1), 5, 2.0)
    assert total(other).generation_tokens == count + 5


def test_a_reader_never_sees_half_a_value(main) -> None:
    """The two values differ in every byte."""
    halves = [bytes([byte]) * 8 for byte in (0x3F, 0x40)]
    program = f"""
    a, b = memoryview({b"".join(halves)!r}).cast("d")
    print("ready", flush=True)
    while True:
        counts.own[50] = a
        counts.own[50] = b
    """
    seen = set()
    with process(main, program) as child:
        wait_until(lambda: main.total(50))
        while len(seen) < 2:
            assert child.poll() is None
            seen |= {main.total(50) for _ in range(100_000)}
    assert seen == {struct.unpack("d", half)[0] for half in halves}
