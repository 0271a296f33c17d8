"""Declared stages in a running engine; its vocabulary and sizes are those of conftest.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling.declaration import Stage
from jaxserve.sampling.registry import check_params
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.testing.example_stages import SCALE, STAGES, scale

pytestmark = pytest.mark.usefixtures("compile_quickly")

VOCAB = 300
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "num_blocks": 257,
    "block_size": 4,
}
VARIANTS: dict[str, dict[str, int]] = {
    "plain": {},
    "overlapped": {"depth": 2},
    "chunked and overlapped": {"max_num_batched_tokens": 9, "depth": 2},
    "preempted and overlapped": {"num_blocks": 26, "depth": 2},
}
NUM_TOKENS = 14


@pytest.fixture(scope="module")
def staged_runner(new_runner) -> ModelRunner:
    return new_runner(stages=STAGES)


def serve(
    runner: ModelRunner, submits: Sequence[Submit], *, depth: int = 1, constraint=None, **sizes: int
) -> tuple[dict[str, list[int]], int]:
    """Returns the tokens of each request, and the number of preemptions."""

    def compiled(_: Submit) -> Future:
        future: Future = Future()
        future.set_result(constraint())
        return future

    core = EngineCore(
        Scheduler(**{**SIZES, **sizes}), runner, depth=depth, compile_grammar=compiled
    )
    for submit in submits:
        core.add(submit)
    tokens: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    while core.has_work:
        for output in core.step(0.0):
            tokens[output.request_id] += output.token_ids
    return tokens, core.stats().total_preemptions


def make_submits(num: int, **more: Any) -> list[Submit]:
    """Returns requests with different values; two of every four are greedy, one has none."""
    rng = np.random.default_rng(5)
    submits = []
    for i in range(num):
        extra = [None, {"lower": 3.0 + i}, {"once": True}, {"drop": 0.5, "lower": 2.0}][i % 4]
        params = SamplingParams(
            temperature=1.0 if i % 4 >= 2 else 0.0, seed=i, max_tokens=NUM_TOKENS,
            extra_args=extra, **more,
        )  # fmt: skip
        prompt = rng.integers(0, 250, 5 + 7 * i % 40).tolist()
        submits.append(Submit(str(i), prompt, params))
    return submits


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_do_not_depend_on_batch_overlap_or_preemption(staged_runner, variant):
    submits = make_submits(8)
    together, preemptions = serve(staged_runner, submits, **VARIANTS[variant])
    assert (preemptions > 0) == ("preempted" in variant)
    for submit in submits:
        alone, _ = serve(staged_runner, [submit])
        assert together[submit.request_id] == alone[submit.request_id]
        if (submit.params.extra_args or {}).get("once"):
            assert len(set(together[submit.request_id])) == NUM_TOKENS


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_requests_equal_a_loop_over_the_whole_sequence(staged_runner, tiny_model, depth):
    submits = [s for s in make_submits(8) if s.params.is_greedy]
    served, _ = serve(staged_runner, submits, depth=depth)
    plain, _ = serve(
        staged_runner,
        [Submit(s.request_id, s.prompt_token_ids, make_submits(1)[0].params) for s in submits],
    )
    assert any(served[name] != plain[name] for name in served), "the stage must matter"
    for submit in submits:
        tokens = list(submit.prompt_token_ids)
        for _ in range(NUM_TOKENS):
            logits = tiny_model.last_logits(tokens)
            logits[np.unique(tokens[-4:])] -= (submit.params.extra_args or {}).get("lower", 0.0)
            tokens.append(int(logits.argmax()))
        assert served[submit.request_id] == tokens[len(submit.prompt_token_ids) :]


class Evens:
    """A constraint that allows even tokens, and after one that is divisible by 4 only multiples
    of 3 as well."""

    error = None

    def __init__(self) -> None:
        self.last = 2

    def allowed(self) -> np.ndarray:
        return np.arange(0, VOCAB, 2 if self.last % 4 else 6)

    def fill_mask(self, mask: np.ndarray) -> None:
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[self.allowed()] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<u4")

    def accept(self, token_id: int) -> FinishReason | None:
        assert token_id in self.allowed()
        self.last = token_id
        return None


@pytest.mark.parametrize("depth", [1, 2])
def test_constrained_requests_use_stages(staged_runner, tiny_model, depth):
    submits = make_submits(8, grammar=Grammar("regex", "x"))
    served, _ = serve(staged_runner, submits, depth=depth, constraint=Evens)
    for submit in submits:
        constraint, tokens = Evens(), list(submit.prompt_token_ids)
        for token in served[submit.request_id]:
            if submit.params.is_greedy:
                logits = tiny_model.last_logits(tokens)
                lower = (submit.params.extra_args or {}).get("lower", 0.0)
                logits[np.unique(tokens[-4:])] -= lower
                allowed = constraint.allowed()
                assert token == allowed[logits[allowed].argmax()]
            constraint.accept(token)
            tokens.append(token)


def test_a_request_that_a_stage_cannot_run_is_refused(staged_runner) -> None:
    def fail(values: Any) -> dict[str, Any]:
        assert values["factor"] != 2.0, "no twos"
        return {"factor": values["factor"]}

    failing = Stage(name="scale", apply=scale, parameters=SCALE.parameters, arrays=fail)
    core = EngineCore(
        Scheduler(**SIZES),
        staged_runner,
        depth=2,
        check_params=lambda params: check_params([failing], params),
    )
    for factor in (2.0, 3.0):
        params = SamplingParams(seed=0, max_tokens=2, extra_args={"factor": factor})
        core.add(Submit(str(factor), [1, 2], params))

    def outputs() -> Iterator[tuple[str, int | None]]:
        while core.has_work:
            yield from ((o.request_id, o.finish_reason) for o in core.step(0.0))

    ended = {name: reason for name, reason in outputs() if reason is not None}
    assert ended == {"2.0": FinishReason.ERROR, "3.0": FinishReason.LENGTH}
