"""The end of an LLM within a process: collections, interrupts and closing, with nothing lost."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.front.requests import GenerateRequest
from jaxserve.llm import LLM, CallFailedError
from jaxserve.llm import llm as llm_module
from jaxserve.llm.background import Background
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_runner import FakeRunner
from jaxserve.testing.waiting import wait_until

FACTORY = "jaxserve.testing.fake_engine:build"
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TIMEOUT_S = 60


def make(checkpoint: Path, build: Callable[..., Any] | None = None) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load_factory", lambda name: build or fake_engine.build)
        return LLM(str(checkpoint), show_progress=False)


def all_ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(timeout=60)
    return not any(thread.is_alive() for thread in threads)


@pytest.fixture
def started():
    """Returns the threads of LLMs that have started since the beginning of the test."""
    before = set(threading.enumerate())
    return lambda: {t for t in threading.enumerate() if t.name in ("llm", "engine")} - before


def forgotten(llm: LLM) -> weakref.ref[LLM]:
    """Makes an LLM part of a cycle, so that only a collection finds it."""
    llm.me = llm  # type: ignore[attr-defined]
    return weakref.ref(llm)


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_a_collection_on_the_thread_of_the_loop(front_checkpoint: Path, started) -> None:
    llm = make(front_checkpoint)
    call, reference = llm._background.call, forgotten(llm)
    del llm

    async def work() -> str:
        gc.collect()
        return "collected"

    assert call(work()) == "collected"
    assert reference() is None
    assert all_ended(started())


@pytest.mark.usefixtures("no_collections")
def test_a_collection_on_the_thread_of_the_engine(
    front_checkpoint: Path, started, monkeypatch
) -> None:
    execute, collected = FakeRunner.execute, threading.Event()
    llm = make(front_checkpoint)

    def collect(self, plan):
        if threading.current_thread().name == "engine" and reference() is not None:
            gc.collect()
            collected.set()
        return execute(self, plan)

    monkeypatch.setattr(FakeRunner, "execute", collect)
    background, text_engine = llm._background, llm._text_engine
    reference = forgotten(llm)
    del llm

    async def work() -> None:
        async for _ in text_engine.generate(GenerateRequest(prompts=[[1]], params=ENDLESS)):
            pass

    with pytest.raises(EngineDeadError, match="closed"):
        background.call(work())
    assert collected.wait(TIMEOUT_S)
    assert reference() is None
    assert all_ended(started())


def test_a_garbage_collected_llm_has_ended_its_threads(front_checkpoint: Path, started) -> None:
    llm = make(front_checkpoint)
    reference, threads = weakref.ref(llm), started()
    assert {"engine", "llm"} <= {thread.name for thread in threads}
    del llm
    gc.collect()
    assert reference() is None
    assert not any(thread.is_alive() for thread in threads), "and their memory is free"


def slow(step_s: float = 0.01) -> Callable[..., Any]:
    def build(config, engine, on_progress):
        import dataclasses

        model = dataclasses.replace(config.model, model=f"fake:step_s={step_s}")
        return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)

    return build


def test_closing_ends_the_calls_of_other_threads(front_checkpoint: Path, started) -> None:
    llm = make(front_checkpoint, slow())
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(llm.generate, ["a", "b"], [SHORT, ENDLESS], use_tqdm=False)
            for _ in range(4)
        ]
        # All first prompts have ended.
        wait_until(lambda: llm._text_engine.metrics.finished["length"] == 4)
        llm.close()
        for call in calls:
            with pytest.raises(CallFailedError, match="closed") as caught:
                call.result(TIMEOUT_S)
            first, second = caught.value.outputs
            assert first.finished
            assert len(first.outputs[0].token_ids) == 3
            assert not second.finished
            assert 3 <= len(second.outputs[0].token_ids) < 900
    assert all_ended(started())


def test_closing_ends_a_call_whose_prompts_are_being_encoded(
    front_checkpoint: Path, monkeypatch
) -> None:
    llm = make(front_checkpoint)
    encoding, encoded = threading.Event(), threading.Event()

    def encode(text, **options):
        encoding.set()
        encoded.wait(TIMEOUT_S)
        return [1]

    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **_: encode(text))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, "long " * 1000, SHORT, use_tqdm=False)
        encoding.wait(TIMEOUT_S)
        llm.close()
        with pytest.raises(CallFailedError, match="closed") as caught:
            call.result(TIMEOUT_S)
        encoded.set()
    assert caught.value.outputs == []


def test_calls_that_race_with_closing_end(front_checkpoint: Path) -> None:
    """Whatever comes first, no thread waits for ever."""
    for _ in range(20):
        llm = make(front_checkpoint)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(llm.generate, "a", SHORT, use_tqdm=False) for _ in range(4)]
            llm.close()
            for call in calls:
                error = call.exception(TIMEOUT_S)
                assert error is None or isinstance(error, CallFailedError)


def interrupt_when(condition: Callable[[], object]) -> None:
    """Sends SIGINT to the main thread once a condition holds."""

    def interrupt() -> None:
        wait_until(condition)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    threading.Thread(target=interrupt).start()


def test_an_interrupt_has_the_outputs_and_the_engine_goes_on(front_checkpoint: Path) -> None:
    with make(front_checkpoint, slow()) as llm:
        interrupt_when(lambda: llm._text_engine.metrics.finished["length"])
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate([[1], [2], [3]], [SHORT, ENDLESS, ENDLESS], use_tqdm=False)
        first, *others = caught.value.outputs  # type: ignore[attr-defined]
        assert first.finished
        assert len(first.outputs[0].token_ids) == 3
        for output in others:
            assert not output.finished
            assert output.outputs[0].finish_reason is None
            assert output.error is None
        (again,) = llm.generate([[1]], SHORT, use_tqdm=False)
        assert again == first
        # The call has ended when the interrupt is raised: nothing of it is left.
        assert llm._text_engine.num_in_flight == 0


def test_an_interrupt_while_the_engine_is_built_ends_the_build(
    front_checkpoint: Path, started
) -> None:
    building = threading.Event()
    reports = []

    def build(config, engine, on_progress):
        building.set()
        for i in range(10**9):
            reports.append(i)
            fake_engine.build(config, engine, on_progress)
        raise AssertionError("the build was not ended")

    interrupt_when(building.is_set)
    with pytest.raises(KeyboardInterrupt):
        make(front_checkpoint, build)
    assert all_ended(started())
    assert reports


def test_a_build_that_fails_raises_its_error_and_leaves_no_thread(
    front_checkpoint: Path, started
) -> None:
    def build(config, engine, on_progress):
        raise ConfigError("impossible")

    with pytest.raises(ConfigError, match="impossible"):
        make(front_checkpoint, build)
    assert all_ended(started())


def test_an_engine_that_fails_does_not_take_the_answers_before(front_checkpoint: Path) -> None:
    def build(config, engine, on_progress):
        import dataclasses

        model = dataclasses.replace(config.model, model="fake:fail_on_step=8")
        return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)

    with make(front_checkpoint, build) as llm:
        with pytest.raises(CallFailedError, match="asked to fail") as caught:
            llm.generate([[1], [2]], [SHORT, ENDLESS], use_tqdm=False)
        first, second = caught.value.outputs
        assert first.finished
        assert first.error is None
        assert second.outputs[0].finish_reason == "error"
        assert second.error == str(caught.value)
        with pytest.raises(EngineDeadError, match="asked to fail"):
            llm.generate([[1]], SHORT, use_tqdm=False)


def test_a_call_that_ends_while_the_loop_ends_returns() -> None:
    background = Background()
    blocked, queued, gate = threading.Event(), threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        gate.wait(TIMEOUT_S)

    async def work() -> str:
        return "done"

    with ThreadPoolExecutor(2) as pool:
        blocking = pool.submit(background.call, block())
        blocked.wait(TIMEOUT_S)
        call_soon = background._call_soon
        background._call_soon = lambda function: (call_soon(function), queued.set())  # type: ignore[assignment]
        calling = pool.submit(background.call, work())
        queued.wait(TIMEOUT_S)
        background._begin_to_close()
        gate.set()
        # The call and the end of the loop are in the same turn of the loop.
        assert calling.result(TIMEOUT_S) == "done"
        assert blocking.result(TIMEOUT_S) is None
    background.close()
