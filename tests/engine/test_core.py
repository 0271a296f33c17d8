"""Engine core: steps in flight, aborts, errors and stats."""

import subprocess
import sys
import threading

import pytest

from jaxserve.core.plan import StepResult
from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.fake_runner import FakeRunner

SIZES = {"max_model_len": 60, "num_blocks": 40, "block_size": 4}


def make_scheduler():
    return Scheduler(max_num_seqs=4, max_num_batched_tokens=16, **SIZES)


def make_core(depth, *, model=None, gate=None):
    model = model or FakeModel()
    runner = FakeRunner(
        model, num_blocks=SIZES["num_blocks"], block_size=SIZES["block_size"], gate=gate
    )
    return EngineCore(make_scheduler(), runner, depth=depth)


def submit(request_id, prompt=(1, 2, 3), *, max_tokens=4, eos_token_id=None):
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Submit(request_id, list(prompt), params, eos_token_id=eos_token_id)


def run_until_idle(core):
    tokens, reasons = {}, {}
    for turn in range(1000):
        if not core.has_work:
            return tokens, reasons
        for output in core.step(float(turn)):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    raise AssertionError("requests do not end")


class RecordingRunner:
    """Samples token 5 in every row and records the calls of its methods and of its steps."""

    num_compilations = 3

    def __init__(self):
        self.events = []

    def execute(self, plan):
        self.events.append(("execute", plan.step_id))
        return RecordingStep(self.events, plan)


class RecordingStep:
    def __init__(self, events, plan):
        self.events = events
        self.plan = plan

    def result(self):
        self.events.append(("result", self.plan.step_id))
        return StepResult([[5]] * len(self.plan.sampling))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_gets_the_expected_tokens(depth):
    core = make_core(depth)
    prompts = {str(i): [i] * (1 + 3 * i) for i in range(9)}
    for request_id, prompt in prompts.items():
        core.add(submit(request_id, prompt, max_tokens=7))
    tokens, reasons = run_until_idle(core)
    for request_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=7, seed=0)
        assert tokens[request_id] == expected_tokens(prompt, params, FakeModel(), context_length=60)
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert len(reasons) == 9


def test_depth_1_waits_for_each_step_before_planning_the_next():
    runner = RecordingRunner()
    core = EngineCore(make_scheduler(), runner, depth=1)
    core.add(submit("a", max_tokens=3))
    tokens, _ = run_until_idle(core)
    assert tokens == {"a": [5, 5, 5]}
    assert runner.events == [(what, i) for i in range(3) for what in ("execute", "result")]


def test_depth_2_starts_the_next_step_before_waiting_for_the_previous():
    runner = RecordingRunner()
    core = EngineCore(make_scheduler(), runner, depth=2)
    core.add(submit("a", max_tokens=3))
    assert core.step(0.0) == [], "the first call returns at once, since more may have arrived"
    assert runner.events == [("execute", 0)]
    tokens, _ = run_until_idle(core)
    assert tokens == {"a": [5, 5, 5]}
    assert runner.events == [
        ("execute", 0),
        ("execute", 1),
        ("result", 0),
        ("execute", 2),
        ("result", 1),
        ("result", 2),
    ]


def test_a_request_that_arrives_during_a_step_joins_the_next_step():
    core = make_core(2)
    core.add(submit("a"))
    assert core.step(0.0) == []
    core.add(submit("b"))
    assert [o.request_id for o in core.step(1.0)] == ["a"]
    assert [o.request_id for o in core.step(2.0)] == ["a", "b"]


def test_a_step_waits_for_the_device():
    gate = threading.Event()
    core = make_core(1, gate=gate)
    core.add(submit("a"))
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(core.step(0.0)))
    thread.start()
    thread.join(timeout=0.1)
    assert thread.is_alive()
    assert outputs == []
    gate.set()
    thread.join(timeout=60)
    assert len(outputs) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_step_raises_the_exceptions_of_the_runner(depth):
    core = make_core(depth, model=FakeModel(fail_on_step=3))
    core.add(submit("a"))
    with pytest.raises(RuntimeError, match="asked to fail"):
        run_until_idle(core)


def test_a_request_that_cannot_be_served_ends_with_an_error_and_others_continue(caplog):
    core = make_core(2)
    core.add(submit("a"))
    core.add(submit("too long", [1] * 60))
    core.add(submit("empty", []))
    _, reasons = run_until_idle(core)
    assert reasons == {
        "a": FinishReason.LENGTH,
        "too long": FinishReason.ERROR,
        "empty": FinishReason.ERROR,
    }
    assert "maximum context length is 60" in caplog.text


def test_a_rejected_request_counts_as_work():
    core = make_core(1)
    core.add(submit("empty", []))
    assert core.has_work
    (output,) = core.step(0.0)
    assert (output.request_id, output.finish_reason) == ("empty", FinishReason.ERROR)
    assert output.error == "the prompt is empty; expected at least 1 token"
    assert not core.has_work
    assert core.step(1.0) == []


def test_waits_for_the_step_in_flight_after_an_abort():
    runner = RecordingRunner()
    core = EngineCore(make_scheduler(), runner, depth=2)
    core.add(submit("a"))
    core.step(0.0)
    core.abort(["a", "nobody"])
    assert core.has_work
    assert core.step(1.0) == []
    assert not core.has_work
    assert runner.events == [("execute", 0), ("result", 0)]
    assert core.stats().kv_usage == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_stats_report_each_step_once(depth):
    core = EngineCore(make_scheduler(), RecordingRunner(), depth=depth)
    core.add(submit("a", max_tokens=3))
    core.add(submit("b", max_tokens=2))
    seen = []
    while core.has_work:
        core.step(0.0)
        seen.append(core.stats())
    assert [s.num_step_tokens for s in seen if s.num_step_tokens] == [6, 2, 1]
    assert [s.total_steps for s in seen if s.num_step_tokens] == [1, 2, 3]
    assert seen[-1].total_compilations == 3
    assert (seen[-1].total_prompt_tokens, seen[-1].total_generation_tokens) == (6, 5)
    core.add(submit("c"))
    core.step(0.0)
    assert core.stats().num_step_tokens == (3 if depth == 1 else 0), "counts only ended steps"


def test_an_engine_with_a_fake_runner_runs_without_jax():
    program = """
import sys
from jaxserve.config import EngineConfig
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_engine import build

core = build(EngineConfig(), 0, lambda progress: None).core
core.add(Submit("a", [1, 2, 3], SamplingParams(max_tokens=5, seed=0)))
outputs = []
while core.has_work:
    outputs += core.step(0.0)
assert len(outputs) == 5, outputs
found = [name for name in ("jax", "numpy", "torch", "transformers") if name in sys.modules]
assert not found, found
print("ran")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ran\n", done.stderr
