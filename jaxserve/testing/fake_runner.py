"""A runner without jax, whose tokens are arithmetic.

The next token is a hash of all tokens before it. Those that a step sees must be in the cache, where
only plans have written them: a scheduler that confuses slots, block tables, rows or positions, or
gives back a block too early, fails an assertion. `expected_tokens` computes the right output.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.core.block_pool import NULL_BLOCK
from jaxserve.core.plan import ScheduledRequest, StepPlan, StepResult
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.testing.fake_model import FakeModel, fake_logprobs, next_token

Propose = Callable[[Sequence[int], int], Sequence[int]]


class FakeRunner:
    """Runs plans on the host, at once and in order, as a device with a queue would.

    Asserts that every plan is sound: positions have no gaps, slots are in blocks of the row, no
    written block is in another block table, new rows are declared, token IDs are the known ones. In
    every group of layers, the blocks that a window reaches belong to the row and hold its tokens.

    Args:
      model: the behaviour of the runner.
      num_blocks, block_size: the size of the cache.
      windows: the window of each group of layers; see `CacheGroups`.
      gate: if given, no step is ready before this event is set; for tests.
      propose: proposes drafts for requests that speculate, from their tokens and the number of
        drafts wanted; it may return fewer.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        gate: threading.Event | None = None,
        propose: Propose = lambda tokens, count: [],
    ) -> None:
        self._propose = propose
        self._model = model
        self._block_size = block_size
        self._windows = windows
        self._blocks = [_Block((-1, -1), array("q", [-1] * block_size)) for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}
        self._gate = gate
        self._calls = itertools.count(1)
        self._last_step_id = -1

    @property
    def num_compilations(self) -> int:
        """Always 0."""
        return 0

    def execute(self, plan: StepPlan) -> FakeStep:
        """Runs a step.

        Raises:
          RuntimeError: this is the step ``FakeModel.fail_on_step``, or a request has the token
            ``FakeModel.fail_on_token``.
        """
        bad_token = self._model.fail_on_token
        is_bad = bad_token is not None and any(
            bad_token in s.known_token_ids for s in plan.scheduled
        )
        if is_bad or next(self._calls) == self._model.fail_on_step:
            raise RuntimeError("the fake runner was asked to fail on this step")
        assert plan.step_id > self._last_step_id, "steps run in order"
        self._last_step_id = plan.step_id
        self._check(plan)
        rows = [self._place(scheduled) for scheduled in plan.scheduled]
        self._check_owners(plan, rows)
        starts = [
            self._write(row, scheduled) for row, scheduled in zip(rows, plan.scheduled, strict=True)
        ]
        for row, start in zip(rows, starts, strict=True):
            self._read(row, start)
        tokens = [
            self._sample(row, scheduled)
            for row, scheduled in zip(rows, plan.scheduled, strict=True)
            if scheduled.samples
        ]
        params = [scheduled.params for scheduled in plan.sampling]
        logprobs = None
        if any(p.logprobs is not None for p in params):
            pairs = zip(tokens, params, strict=True)
            logprobs = [self._logprobs(several, p.logprobs) for several, p in pairs]
        num_drafts = [len(self._rows[s.row].drafts) for s in plan.sampling]
        prompt_logprobs = [self._score(scheduled) for scheduled in plan.scoring]
        # Every element is the number of tokens.
        pooled = [[float(scheduled.num_tokens)] * self._model.width for scheduled in plan.pooling]
        result = StepResult(
            tokens, logprobs, prompt_logprobs, pooled, num_drafts if plan.speculates else ()
        )
        return FakeStep(result, self._gate, self._model.step_s)

    def _score(self, scheduled: ScheduledRequest) -> list[TokenLogprobs]:
        start = scheduled.start + 1
        tokens = scheduled.known_token_ids[start : start + scheduled.num_prompt_targets]
        return self._logprobs(tokens, scheduled.params.prompt_logprobs) or []

    def _logprobs(self, tokens: Sequence[int], k: int | None) -> list[TokenLogprobs] | None:
        if k is None:
            return None
        return [fake_logprobs(token, k, self._model.vocab_size) for token in tokens]

    def _check(self, plan: StepPlan) -> None:
        assert plan.scheduled, "an empty step"
        rows = {s.row for s in plan.scheduled}
        assert len(rows) == len(plan.scheduled), "two requests in one row"
        ids = {s.request_id for s in plan.scheduled}
        assert len(ids) == len(plan.scheduled), "a request is scheduled twice"
        is_longer = [s.num_tokens > s.num_rows for s in plan.scheduled]
        assert is_longer == sorted(is_longer), "rows with one token come first"
        assert plan.speculates == any(s.speculates for s in plan.scheduled)

    def _place(self, scheduled: ScheduledRequest) -> _Row:
        """Returns the row of a scheduled request, with its block tables up to date."""
        if scheduled.is_new:
            tokens = array("q", scheduled.known_token_ids[: scheduled.start])
            self._rows[scheduled.row] = _Row(
                scheduled.request_id, [[] for _ in self._windows], tokens
            )
        row = self._rows[scheduled.row]
        assert row.request_id == scheduled.request_id, "a row got another request without is_new"
        if scheduled.speculates:
            self._check_bounds(row, scheduled)
        else:
            assert scheduled.start == len(row.tokens), "a gap or an overlap in the positions"
        for group, start, block_ids in scheduled.table_updates:
            table = row.block_tables[group]
            end = start + len(block_ids)
            if any(block_ids):
                assert start == len(table), "a gap or an overlap in the block table"
                assert all(0 < b < len(self._blocks) for b in block_ids), "a block does not exist"
            else:
                assert all(table[start:end]), "a block is given back twice"
                assert end <= len(table), "the table has no block to give back"
            table[start:end] = block_ids
        assert len(set(row.held())) == len(row.held()), "a block is twice in the tables of a row"
        return row

    def _check_bounds(self, row: _Row, scheduled: ScheduledRequest) -> None:
        """Asserts that the position on the device is within what the host knows of it."""
        num_known = len(scheduled.known_token_ids)
        assert scheduled.num_tokens == scheduled.num_rows, "a row has more than one token"
        assert scheduled.start + 1 == num_known + scheduled.num_unknown_tokens
        assert num_known <= len(row.tokens) + 1 <= scheduled.start + 1, "outside the bounds"
        if scheduled.starts_speculation:
            assert len(row.tokens) == scheduled.start, "the position is not exact"
        else:
            assert row.is_speculating, "the device does not know the tokens of the row"

    def _check_owners(self, plan: StepPlan, rows: list[_Row]) -> None:
        """Asserts that every written block is in one block table only; full ones may be shared."""
        holders = Counter(itertools.chain.from_iterable(row.held() for row in rows))
        for row, scheduled in zip(rows, plan.scheduled, strict=True):
            end = scheduled.start + scheduled.num_tokens
            start = min(scheduled.start, len(row.tokens))
            first, last = start // self._block_size, (end - 1) // self._block_size
            for table in row.block_tables:
                assert last < len(table), "a slot is outside the blocks of the row"
                written = table[first : last + 1]
                assert all(written), "a written block was given back"
                assert all(holders[block] == 1 for block in written), "a written block is shared"

    def _write(self, row: _Row, scheduled: ScheduledRequest) -> int:
        """Writes the tokens of a step to the cache; returns the position of the first."""
        row.drafts = []
        row.is_speculating = scheduled.speculates
        start, end = scheduled.start, scheduled.start + scheduled.num_tokens
        if scheduled.speculates:
            start = len(row.tokens)
            # The host knows the last token of a row whose only output was computed in a prefill.
            last = row.last_token
            if not scheduled.num_unknown_tokens:
                last = scheduled.known_token_ids[-1]
            if scheduled.num_drafts:
                proposed = self._propose([*row.tokens, last], scheduled.num_drafts)
                row.drafts = list(proposed[: scheduled.num_drafts])
            tokens = [last, *row.drafts]
        elif scheduled.token_ids:
            tokens = scheduled.token_ids
            assert list(tokens) == scheduled.known_token_ids[start:end], (
                "token IDs differ from the known ones"
            )
        else:
            tokens = [row.last_token]
            assert start == len(scheduled.known_token_ids), "token IDs are missing although known"
        assert scheduled.speculates or len(tokens) == scheduled.num_tokens
        for group, table in enumerate(row.block_tables):
            for position, token in enumerate(tokens, start):
                index, offset = divmod(position, self._block_size)
                block = self._blocks[table[index]]
                block.place = (group, index)
                block.tokens[offset] = token
        row.tokens.extend(tokens)
        return start

    def _read(self, row: _Row, start: int) -> None:
        """Asserts that the cache has all tokens that queries from position ``start`` on see."""
        size, end = self._block_size, len(row.tokens)
        for group, (window, table) in enumerate(zip(self._windows, row.block_tables, strict=True)):
            first = 0 if window is None else max(0, start - window + 1) // size
            block_ids = table[first : -(-end // size)]
            assert all(block_ids), "a window reaches a block that was given back"
            blocks = [self._blocks[block_id] for block_id in block_ids]
            places = [(group, first + i) for i in range(len(blocks))]
            tokens = array("q", itertools.chain.from_iterable(block.tokens for block in blocks))
            assert [block.place for block in blocks] == places, "a seen block belongs to another"
            seen = tokens[: end - first * size]
            assert seen == row.tokens[first * size :], "a seen block holds other tokens"

    def _sample(self, row: _Row, scheduled: ScheduledRequest) -> list[int]:
        """Returns the sampled tokens: one, and one for each draft that equals the one before."""
        if not scheduled.speculates:
            num_tokens = len(scheduled.known_token_ids) + scheduled.num_unknown_tokens
            assert len(row.tokens) == num_tokens, "sampling must follow the last token"
        first = len(row.tokens) - len(row.drafts)
        sampled: list[int] = []
        for count, draft in enumerate([*row.drafts, None], first):
            sampled.append(self._next_token(row.tokens[:count], scheduled))
            if draft != sampled[-1]:
                break
        del row.tokens[first + len(sampled) - 1 :]
        row.last_token = sampled[-1]
        return sampled

    def _next_token(self, context: array[int], scheduled: ScheduledRequest) -> int:
        return next_token(
            context,
            scheduled.params,
            self._model,
            num_prompt_tokens=scheduled.num_prompt_tokens,
            eos_token_id=scheduled.eos_token_id,
        )


@dataclass(slots=True)
class _Row:
    """A running request: its block tables, and its tokens in the cache."""

    request_id: str
    block_tables: list[list[int]]
    tokens: array[int]
    last_token: int = -1
    drafts: list[int] = field(default_factory=list[int])
    is_speculating: bool = False

    def held(self) -> list[int]:
        """Returns the blocks in the tables."""
        return [b for table in self.block_tables for b in table if b != NULL_BLOCK]


@dataclass(slots=True)
class _Block:
    """A block: the group and the index in the block table that it was written for, its tokens."""

    place: tuple[int, int]
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A step that has already run. Its result is withheld until the gate is set."""

    _result: StepResult
    _gate: threading.Event | None
    _step_s: float

    def sample(self) -> None:
        """Does nothing: a fake ignores constraints."""

    def result(self) -> StepResult:
        """Waits for the gate, then for the duration of a step."""
        if self._gate is not None:
            self._gate.wait()
        if self._step_s > 0:
            threading.Event().wait(self._step_s)
        return self._result
