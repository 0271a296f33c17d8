"""A runner without jax, whose tokens are arithmetic.

The next token is a hash of everything before it. The tokens before it are read back through the
block table from a cache that only plans have written to, so a scheduler that mixes up slots,
tables, rows or positions changes the answer. `expected_tokens` says what the answer should be.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.core.plan import ScheduledRequest, StepPlan, StepResult
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.sampling_params import SamplingParams

POOLED_WIDTH = 8
"""Of the vectors that a fake runner returns."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What a fake runner does.

    Attributes:
      vocab_size: tokens are in ``[0, vocab_size)``.
      step_s: seconds that a step takes.
      eos_after: a request that has an end token samples it as this one of its output tokens,
        counted from 1; None: only when the hash hits it.
      fail_on_step: this call of `FakeRunner.execute`, counted from 1, raises.
    """

    vocab_size: int = 1000
    step_s: float = 0.0
    eos_after: int | None = None
    fail_on_step: int | None = None

    @classmethod
    def parse(cls, text: str) -> FakeModel:
        """From ``fake:vocab=300,step_s=0.01,eos_after=5,fail_on_step=9``.

        Options may be left out; the name of any other model stands for a fake one without options.

        Raises:
          ConfigError: an option is not one of these four, or its value is not a number.
        """
        name, _, rest = text.partition(":")
        if name != "fake":
            return cls()
        options = [item.split("=") for item in rest.split(",") if item]
        try:
            values = {name: float(value) for name, value in options}
            step_s = values.pop("step_s", 0.0)
            known = {
                "vocab": "vocab_size",
                "eos_after": "eos_after",
                "fail_on_step": "fail_on_step",
            }
            numbers = {known[name]: int(value) for name, value in values.items()}
        except (ValueError, KeyError) as error:
            raise ConfigError(
                "a fake model is named like fake:vocab=300,step_s=0.01,eos_after=5,fail_on_step=9 "
                f"(each option may be left out), got {text!r}"
            ) from error
        return cls(step_s=step_s, **numbers)


class FakeRunner:
    """Runs plans on the host, at once and in order, as a device with a queue would.

    It asserts that every plan is sound: positions without gaps, slots within the row's own
    blocks, no block written that another row reads, new rows declared, tokens as announced.

    Args:
      model: what it does.
      num_blocks, block_size: its cache.
      gate: if given, no step is ready before this event is set; for tests.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_blocks: int,
        block_size: int,
        gate: threading.Event | None = None,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._cache = [array("q", [-1] * block_size) for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}
        self._gate = gate
        self._calls = itertools.count(1)
        self._last_step_id = -1

    @property
    def num_compilations(self) -> int:
        """A fake compiles nothing."""
        return 0

    def execute(self, plan: StepPlan) -> FakeStep:
        """Runs a step.

        Raises:
          RuntimeError: this is the step that was asked to fail.
        """
        if next(self._calls) == self._model.fail_on_step:
            raise RuntimeError("the fake runner was asked to fail on this step")
        assert plan.step_id > self._last_step_id, "steps run in order"
        self._last_step_id = plan.step_id
        self._check(plan)
        rows = [self._place(part) for part in plan.scheduled]
        self._check_owners(plan, rows)
        for row, part in zip(rows, plan.scheduled, strict=True):
            self._write(row, part)
        tokens = []
        for row, part in zip(rows, plan.scheduled, strict=True):
            if part.samples:
                row.last_token = self._sample(row, part)
                tokens.append(row.last_token)
        params = [part.params for part in plan.sampling]
        logprobs = None
        if any(p.logprobs is not None for p in params):
            pairs = zip(tokens, params, strict=True)
            logprobs = [fake_logprobs(t, p.logprobs, self._model.vocab_size) for t, p in pairs]
        prompt_logprobs = [self._score(part) for part in plan.scoring]
        # Each number is a count of tokens.
        pooled = [[float(part.num_tokens)] * POOLED_WIDTH for part in plan.pooling]
        result = StepResult(tokens, logprobs, prompt_logprobs, pooled)
        return FakeStep(result, self._gate, self._model.step_s)

    def _score(self, part: ScheduledRequest) -> list[TokenLogprobs]:
        start = part.start + 1
        tokens = part.known_token_ids[start : start + part.num_prompt_targets]
        k = part.params.prompt_logprobs
        entries = (fake_logprobs(token, k, self._model.vocab_size) for token in tokens)
        return [entry for entry in entries if entry is not None]

    def _check(self, plan: StepPlan) -> None:
        parts = plan.scheduled
        assert parts, "an empty step"
        assert len({part.row for part in parts}) == len(parts), "two parts in one row"
        assert len({part.request_id for part in parts}) == len(parts), "two parts of one request"
        is_longer = [part.num_tokens > 1 for part in parts]
        assert is_longer == sorted(is_longer), "parts of one token come first"

    def _place(self, part: ScheduledRequest) -> _Row:
        """The row of a part, with the new blocks in its table."""
        if part.is_new:
            self._rows[part.row] = _Row(part.request_id, [], part.start)
        row = self._rows[part.row]
        assert row.request_id == part.request_id, "a row changed hands and was not declared new"
        assert part.start == row.num_written, "a gap or an overlap in the positions"
        assert part.block_offset == len(row.block_table), "a gap or an overlap in the block table"
        assert all(0 < block < len(self._cache) for block in part.new_block_ids), "no such block"
        row.block_table += part.new_block_ids
        assert len(set(row.block_table)) == len(row.block_table), "a block twice in one table"
        return row

    def _check_owners(self, plan: StepPlan, rows: list[_Row]) -> None:
        """A block that a part writes to may be in no other table; full ones may be shared."""
        holders = Counter(itertools.chain.from_iterable(row.block_table for row in rows))
        for row, part in zip(rows, plan.scheduled, strict=True):
            end = part.start + part.num_tokens
            assert end <= len(row.block_table) * self._block_size, "a slot outside the row's blocks"
            first, last = part.start // self._block_size, (end - 1) // self._block_size
            written = row.block_table[first : last + 1]
            assert all(holders[block] == 1 for block in written), "a block is written and shared"

    def _write(self, row: _Row, part: ScheduledRequest) -> None:
        end = part.start + part.num_tokens
        if part.token_ids:
            tokens = part.token_ids
            assert list(tokens) == part.known_token_ids[part.start : end], "other tokens"
        else:
            tokens = [row.last_token]
            assert part.start == len(part.known_token_ids), "a token left out that is known"
        assert len(tokens) == part.num_tokens
        for position, token in enumerate(tokens, part.start):
            block = row.block_table[position // self._block_size]
            self._cache[block][position % self._block_size] = token
        row.num_written = end

    def _sample(self, row: _Row, part: ScheduledRequest) -> int:
        end = row.num_written
        num_tokens = len(part.known_token_ids) + part.num_unknown_tokens
        assert end == num_tokens, "only the last token can be sampled after"
        blocks = row.block_table[: -(-end // self._block_size)]
        context = array("q", itertools.chain.from_iterable(self._cache[b] for b in blocks))[:end]
        return _next_token(
            context,
            part.params,
            self._model,
            num_prompt_tokens=part.num_prompt_tokens,
            eos_token_id=part.eos_token_id,
        )


@dataclass(slots=True)
class _Row:
    request_id: str
    block_table: list[int]
    num_written: int
    last_token: int = -1


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A step that has run already, and is said to be ready when its gate is open."""

    _result: StepResult
    _gate: threading.Event | None
    _step_s: float

    def sample(self) -> None:
        """Nothing is left to do: a fake ignores constraints."""

    def result(self) -> StepResult:
        """Waits for the gate, then as long as a step takes."""
        if self._gate is not None:
            self._gate.wait()
        if self._step_s > 0:
            threading.Event().wait(self._step_s)
        return self._result


def expected_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    model: FakeModel,
    *,
    context_length: int,
    eos_token_id: int | None = None,
) -> list[int]:
    """The whole answer to a prompt, as it must be whatever else a fake runner runs."""
    tokens = array("q", prompt_token_ids)
    num_prompt = len(tokens)
    limit = context_length - num_prompt
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    ends = {eos_token_id, *params.stop_token_ids}
    for count in range(1, limit + 1):
        token = _next_token(
            tokens, params, model, num_prompt_tokens=num_prompt, eos_token_id=eos_token_id
        )
        tokens.append(token)
        if count >= params.min_tokens and token in ends:
            break
    return list(tokens[num_prompt:])


def fake_logprobs(token_id: int, k: int | None, vocab_size: int) -> TokenLogprobs | None:
    """What a fake runner returns with a token: it is the most likely one, those after it follow."""
    if k is None:
        return None
    ids = [token_id, *((token_id + i) % vocab_size for i in range(k))]
    return TokenLogprobs(ids, [-0.5, *(-0.5 - i for i in range(k))], rank=1)


def _next_token(
    context: array[int],
    params: SamplingParams,
    model: FakeModel,
    *,
    num_prompt_tokens: int,
    eos_token_id: int | None,
) -> int:
    """A hash of all tokens so far, and of the seed where one counts."""
    if eos_token_id is not None and len(context) + 1 - num_prompt_tokens == model.eos_after:
        return eos_token_id
    seed = 0 if params.is_greedy else (params.seed or 0)
    return zlib.crc32(context.tobytes(), seed & 0xFFFFFFFF) % model.vocab_size
