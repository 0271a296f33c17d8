"""Random scenarios: every request gets the tokens that it would get alone, without drafts."""

import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.scheduler import Scheduler
from jaxserve.core.speculation import Speculation
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.fake_runner import FakeRunner

EOS = 3
MODEL = FakeModel(vocab_size=12)


@dataclass(frozen=True)
class Arrival:
    """A request, its turn of arrival, and the number of turns to its abort, None for no abort."""

    turn: int
    prompt: list[int]
    params: SamplingParams
    has_eos: bool
    priority: int
    num_prior_tokens: int
    aborted_after: int | None


@dataclass(frozen=True)
class Scenario:
    depth: int
    policy: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    spare_budget: int
    max_model_len: int
    windows: tuple[int | None, ...]
    arrivals: list[Arrival]
    max_drafts: int

    @property
    def cache(self):
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "windows": self.windows,
        }

    @property
    def context(self):
        """The most tokens of a request, at most ``max_model_len``."""
        groups = CacheGroups(self.windows, self.block_size, self.budget + self.max_drafts)
        return groups.longest(self.num_blocks - 1, self.max_model_len)

    @property
    def budget(self):
        return self.max_num_seqs + self.spare_budget

    @property
    def max_num_rows(self):
        return max(self.max_num_seqs, 1 + self.max_drafts)

    @property
    def speculation(self):
        if self.max_drafts == 0:
            return None
        return Speculation(self.max_drafts, step_costs=((self.max_num_rows, 1.0),))


@st.composite
def params(draw):
    max_tokens = draw(st.none() | st.integers(1, 16))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(-5, 5)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 16, 6))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 11), max_size=1))),
    )


arrivals = st.builds(
    Arrival,
    turn=st.integers(0, 12),
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=24),
    params=params(),
    has_eos=st.booleans(),
    priority=st.integers(0, 2),
    num_prior_tokens=st.sampled_from([0, 0, 0, 1, 3]),
    aborted_after=st.none() | st.none() | st.integers(0, 12),
)
scenarios = st.builds(
    Scenario,
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fcfs", "priority"]),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(4, 36),
    max_num_seqs=st.integers(1, 5),
    spare_budget=st.integers(0, 12),
    max_model_len=st.integers(8, 40),
    windows=st.just((None,))
    | st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    arrivals=st.lists(arrivals, min_size=3, max_size=10),
    max_drafts=st.sampled_from([0, 0, 1, 2, 5]),
).filter(lambda scenario: scenario.context > 0)


def propose(tokens, count):
    """Proposes drafts of which some are right, for some seeds, and sometimes fewer than wanted."""
    context = array("q", tokens)
    luck = zlib.crc32(context.tobytes(), 1)
    seed = (luck % 11 - 5) & 0xFFFFFFFF if luck & 64 else 0
    drafts = []
    for _ in range(count - (luck % 3 == 0)):
        drafts.append(zlib.crc32(context.tobytes(), seed) % MODEL.vocab_size)
        context.append(drafts[-1])
    return drafts


class CheckedRunner:
    """A fake runner that checks every plan against the limits and counts rare events."""

    def __init__(self, scenario, seen):
        self._scenario = scenario
        self._seen = seen
        self._runner = FakeRunner(MODEL, **scenario.cache, propose=propose)

    @property
    def num_compilations(self):
        return self._runner.num_compilations

    def execute(self, plan):
        assert plan.num_tokens <= self._scenario.budget
        assert len(plan.scheduled) <= self._scenario.max_num_seqs
        assert len(plan.rows) <= self._scenario.max_num_rows
        for part in plan.scheduled:
            assert 0 <= part.row < self._scenario.max_num_seqs
            self._seen["chunks"] += not part.samples
            gave_back = any(not any(update.block_ids) for update in part.table_updates)
            self._seen["given back"] += gave_back
            self._seen["moved within a prompt"] += gave_back and len(part.token_ids) > 1
            self._seen["unknown tokens"] += part.num_unknown_tokens
            self._seen["drafts in flight"] += part.speculates and part.num_unknown_tokens > 1
            self._seen["speculation ends"] += part.speculates and part.num_drafts == 0
        step = self._runner.execute(plan)
        self._seen["sampled"] += sum(map(len, step.result().token_ids))
        return step


@dataclass
class Record:
    """The outputs of a request so far."""

    arrival: Arrival
    tokens_alone: list[int]
    tokens: list[int] = field(default_factory=list)
    scheduled_s: float | None = None
    finish_reason: int | None = None
    stop_reason: int | None = None
    aborted: bool = False

    @property
    def has_ended(self):
        return self.aborted or self.finish_reason is not None


def tokens_alone(scenario, arrival):
    """Returns the output of the request when it runs alone; None if it is too long to run."""
    context = scenario.context
    limit, num_prior = arrival.params.max_tokens, arrival.num_prior_tokens
    num_prompt_tokens = len(arrival.prompt) - num_prior
    if num_prompt_tokens < 1 or num_prompt_tokens + (limit or 1) > context:
        return None
    if (limit is not None and num_prior >= limit) or len(arrival.prompt) >= context:
        return None
    alone = SamplingParams(
        temperature=arrival.params.temperature,
        seed=arrival.params.seed,
        max_tokens=None if limit is None else limit - num_prior,
        min_tokens=max(0, arrival.params.min_tokens - num_prior),
        stop_token_ids=arrival.params.stop_token_ids,
    )
    eos = EOS if arrival.has_eos else None
    return expected_tokens(arrival.prompt, alone, MODEL, context_length=context, eos_token_id=eos)


def run_scenario(scenario):
    """Runs a scenario to its end, checks the invariants, and returns counts of rare events."""
    seen = Counter()
    scheduler = Scheduler(
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.budget,
        max_model_len=scenario.context,
        policy=scenario.policy,
        speculation=scenario.speculation,
        **scenario.cache,
    )
    core = EngineCore(scheduler, CheckedRunner(scenario, seen), depth=scenario.depth)
    records = {}
    last_turn = max(arrival.turn for arrival in scenario.arrivals)
    turn = 0
    while turn <= last_turn or core.has_work:
        for i, arrival in enumerate(scenario.arrivals):
            if arrival.turn == turn:
                alone = tokens_alone(scenario, arrival)
                records[str(i)] = Record(arrival, alone)
                core.add(make_submit(str(i), arrival, turn))
        for output in core.step(float(turn)):
            add_output(records[output.request_id], output)
        for request_id, record in records.items():
            after = record.arrival.aborted_after
            if after is not None and turn == record.arrival.turn + after and not record.has_ended:
                core.abort([request_id])
                record.aborted = True
        check_state(scheduler, records)
        turn += 1
        assert turn < max_turns(scenario), "requests starve"
    check_end(scenario, core, records)
    stats = core.stats()
    seen["preemptions"] = stats.total_preemptions
    seen["refused"] = sum(record.finish_reason == FinishReason.ERROR for record in records.values())
    seen["aborted"] = sum(record.aborted for record in records.values())
    seen["dropped"] = seen["sampled"] - stats.total_generation_tokens
    accepted = sum(stats.accepted_per_position)
    assert stats.total_drafts <= stats.total_draft_tokens >= accepted
    assert stats.accepted_per_position == tuple(sorted(stats.accepted_per_position, reverse=True))
    seen["accepted"], seen["rejected"] = accepted, stats.total_draft_tokens - accepted
    return seen


def make_submit(request_id, arrival, turn):
    return Submit(
        request_id,
        arrival.prompt,
        arrival.params,
        eos_token_id=EOS if arrival.has_eos else None,
        priority=arrival.priority,
        arrival_s=float(turn),
        num_prior_tokens=arrival.num_prior_tokens,
    )


def add_output(record, output):
    assert not record.has_ended, "an output after the end"
    record.finish_reason = output.finish_reason
    record.stop_reason = output.stop_reason
    if output.finish_reason == FinishReason.ERROR:
        assert output.token_ids == []
        return
    assert output.token_ids
    assert record.scheduled_s in (None, output.scheduled_s), "scheduled_s changed"
    record.scheduled_s = output.scheduled_s
    record.tokens += output.token_ids


def check_state(scheduler, records):
    scheduler.check_integrity()
    stats = scheduler.stats()
    in_flight = [record for record in records.values() if not record.has_ended]
    assert stats.num_running + stats.num_waiting == len(in_flight)
    assert 0 <= stats.kv_usage <= 1


def max_turns(scenario):
    """Returns the number of turns needed if each adds one token to the first request."""
    return 13 + 2 * len(scenario.arrivals) * (scenario.context + 1)


def check_end(scenario, core, records):
    for record in records.values():
        if record.aborted:
            assert record.tokens == (record.tokens_alone or [])[: len(record.tokens)]
        elif record.tokens_alone is None:
            assert record.finish_reason == FinishReason.ERROR
        else:
            assert record.tokens == record.tokens_alone
            check_reason(record)
    if scenario.policy == "fcfs":
        by_arrival = sorted(records.items(), key=lambda item: (item[1].arrival.turn, int(item[0])))
        ran = [s.scheduled_s for _, s in by_arrival if s.scheduled_s is not None]
        assert ran == sorted(ran), "a request overtook another"
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
    fresh = [s for s in records.values() if s.tokens and not s.arrival.num_prior_tokens]
    assert stats.total_prompt_tokens == sum(len(s.arrival.prompt) for s in fresh)
    assert stats.total_generation_tokens == sum(len(s.tokens) for s in records.values())


def check_reason(record):
    last, params = record.tokens[-1], record.arrival.params
    count = len(record.tokens) + record.arrival.num_prior_tokens
    if count >= params.min_tokens and record.arrival.has_eos and last == EOS:
        assert (record.finish_reason, record.stop_reason) == (FinishReason.STOP, None)
    elif count >= params.min_tokens and last in params.stop_token_ids:
        assert (record.finish_reason, record.stop_reason) == (FinishReason.STOP, last)
    else:
        assert (record.finish_reason, record.stop_reason) == (FinishReason.LENGTH, None)


def test_every_request_gets_the_tokens_that_it_would_get_alone():
    seen = Counter()

    @settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(scenarios)
    def check(scenario):
        seen.update(run_scenario(scenario))

    check()
    # Without these events the scenarios would test nothing.
    drafts = ("accepted", "rejected", "drafts in flight", "speculation ends")
    for event in (
        "preemptions",
        "chunks",
        "given back",
        "moved within a prompt",
        "unknown tokens",
        "dropped",
        "aborted",
        "refused",
        *drafts,
    ):
        assert seen[event] > 20, seen
