"""A request waits for its grammar; other requests do not."""

from concurrent.futures import Future

import pytest

from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.core import EngineCore
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output.compiling import COMPILE_TIMEOUT_S
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.fake_runner import FakeRunner

SIZES = {"num_blocks": 40, "block_size": 4}


class ThreeTokens:
    """A constraint that ends the completion with its third token."""

    error = None

    def __init__(self):
        self.tokens = []

    def fill_mask(self, mask):
        raise AssertionError("a fake runner ignores constraints")

    def accept(self, token_id):
        self.tokens.append(token_id)
        return FinishReason.STOP if len(self.tokens) == 3 else None


class Compiler:
    """A compiler of grammars whose results a test provides."""

    def __init__(self):
        self.futures: dict[str, Future] = {}

    def __call__(self, submit):
        return self.futures.setdefault(submit.request_id, Future())


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture(params=[1, 2])
def depth(request):
    return request.param


def make_core(depth, compiler, sizes=SIZES):
    context = min(60, (sizes["num_blocks"] - 1) * sizes["block_size"])
    scheduler = Scheduler(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=context, **sizes)
    runner = FakeRunner(FakeModel(), **sizes)
    return EngineCore(scheduler, runner, depth=depth, compile_grammar=compiler)


@pytest.fixture
def core(depth, compiler):
    return make_core(depth, compiler)


def submit(request_id, grammar=None, max_tokens=5, prompt=(1, 2, 3)):
    params = SamplingParams(seed=0, max_tokens=max_tokens, grammar=grammar)
    return Submit(request_id, list(prompt), params)


ANY = Grammar("regex", "a+")


def outputs_of(core, steps=30, start=0.0):
    outputs = [output for i in range(steps) for output in core.step(start + i)]
    tokens, reasons = {}, {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            reasons[output.request_id] = output.finish_reason
    return tokens, reasons


def test_other_requests_run_while_a_grammar_is_compiled(core, compiler):
    core.add(submit("a", ANY))
    core.add(submit("b"))
    assert core.has_work
    tokens, reasons = outputs_of(core, steps=10)
    assert list(tokens) == ["b"]
    assert reasons == {"b": FinishReason.LENGTH}
    assert core.has_work
    assert core.stats().num_waiting == 1
    constraint = ThreeTokens()
    compiler.futures["a"].set_result(constraint)
    tokens, reasons = outputs_of(core, start=10.0, steps=10)
    assert len(tokens["a"]) == 3, "the constraint ends the completion"
    assert tokens["a"] == constraint.tokens
    assert reasons == {"a": FinishReason.STOP}
    assert not core.has_work
    assert core.stats().num_waiting == 0


def test_the_ids_of_requests_include_those_that_wait_for_a_grammar(core):
    for request_id in "abcdefg":
        core.add(submit(request_id, ANY if request_id == "c" else None, max_tokens=9))
    core.step(0.0)
    assert core.running_ids
    assert sorted(core.request_ids) == list("abcdefg")
    core.abort(core.request_ids)
    assert core.request_ids == ()


def test_a_constraint_sees_each_token_once_in_order(depth, compiler):
    """Six requests share four rows and five blocks, so some are preempted."""
    core = make_core(depth, compiler, {"num_blocks": 6, "block_size": 4})
    requests = {name: submit(name, ANY, prompt=(i, 2, 3)) for i, name in enumerate("abcdef")}
    constraints = {name: ThreeTokens() for name in requests}
    for name, request in requests.items():
        core.add(request)
        compiler.futures[name].set_result(constraints[name])
    tokens, _ = outputs_of(core, steps=60)
    assert core.stats().total_preemptions > 0
    expected = {
        name: expected_tokens(r.prompt_token_ids, r.params, FakeModel(), context_length=20)[:3]
        for name, r in requests.items()
    }
    assert tokens == expected
    assert {name: constraint.tokens for name, constraint in constraints.items()} == expected


def test_an_invalid_grammar_ends_only_its_request(core, compiler):
    core.add(submit("a", ANY))
    core.add(submit("b", ANY))
    compiler.futures["a"].set_exception(InvalidRequestError("no such thing"))
    compiler.futures["b"].set_result(ThreeTokens())
    tokens, reasons = outputs_of(core)
    assert reasons == {"a": FinishReason.ERROR, "b": FinishReason.STOP}
    assert tokens["a"] == []


class LostAtTheSecondToken(ThreeTokens):
    """A constraint that cannot continue after the second token."""

    def accept(self, token_id):
        self.tokens.append(token_id)
        if len(self.tokens) < 2:
            return None
        self.error = "lost"
        return FinishReason.ERROR


def test_the_reason_of_a_constraint_is_in_the_last_output(core, compiler):
    core.add(submit("a", ANY))
    core.add(submit("b", ANY))
    compiler.futures["a"].set_result(LostAtTheSecondToken())
    compiler.futures["b"].set_result(ThreeTokens())
    outputs = [output for i in range(30) for output in core.step(float(i))]
    errors = [(o.request_id, o.error) for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert errors == [("a", "lost")]
    assert sum(len(o.token_ids) for o in outputs if o.request_id == "b") == 3


@pytest.mark.parametrize("error", [InvalidRequestError("too large"), OSError("no tokenizer")])
def test_only_unexpected_errors_log_a_traceback(core, compiler, caplog, error):
    core.add(submit("a", ANY))
    compiler.futures["a"].set_exception(error)
    (output,) = core.step(0.0)
    assert output.error == f"its grammar cannot be compiled: {error}"
    assert f"refused request a: {output.error}" in [r.message for r in caplog.records]
    assert any(r.exc_info for r in caplog.records) == isinstance(error, OSError)


def test_a_grammar_that_takes_too_long_ends_only_its_request(core, compiler):
    core.add(submit("a", ANY))
    core.step(0.0)
    core.add(submit("b", ANY))
    assert core.step(COMPILE_TIMEOUT_S) == []
    (output,) = core.step(COMPILE_TIMEOUT_S + 1)
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert output.error == "its grammar is not compiled after 30 s"
    compiler.futures["b"].set_result(ThreeTokens())
    _, reasons = outputs_of(core, start=COMPILE_TIMEOUT_S + 2)
    assert reasons == {"b": FinishReason.STOP}


def test_abort_cancels_a_compilation(core, compiler):
    core.add(submit("a", ANY))
    core.step(0.0)
    core.abort(["a", "nobody"])
    assert not core.has_work
    assert compiler.futures["a"].cancelled()


def test_rejects_an_id_in_use(core, compiler):
    core.add(submit("a", ANY))
    core.add(submit("a", ANY))
    (output,) = core.step(0.0)
    assert output.finish_reason == FinishReason.ERROR
    assert "in use" in output.error
    compiler.futures["a"].set_result(ThreeTokens())
    _, reasons = outputs_of(core, start=1.0)
    assert reasons == {"a": FinishReason.STOP}


def test_the_engine_waits_for_a_grammar_without_other_work(core, compiler, monkeypatch):
    waits = []
    monkeypatch.setattr(core._compiling, "wait", waits.append)
    core.add(submit("a", ANY))
    core.step(0.0)
    assert len(waits) == 1
    core.add(submit("b"))
    outputs_of(core, steps=5)
    assert len(waits) <= 2
    compiler.futures["a"].set_result(ThreeTokens())
    outputs_of(core, steps=10)
    assert not core.has_work
