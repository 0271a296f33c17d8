"""The engine in a thread fulfils the `Engine` protocol."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable

import pytest

from jaxserve.client.in_process import InProcessEngine
from jaxserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.core import BuiltEngine, EngineCore
from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Progress, RequestOutput, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.fake_runner import FakeRunner
from jaxserve.testing.waiting import until

FAKE = FakeModel()


def ignore(progress: Progress) -> None:
    pass


def config(model: str = "fake", **groups) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=model), **groups)


@pytest.fixture
async def start():
    """Starts engines, and closes them after the test."""
    engines = []

    async def start(
        engine_config: EngineConfig | None = None, build: Callable[[], BuiltEngine] | None = None
    ) -> InProcessEngine:
        build = build or (lambda: fake_engine.build(engine_config or config(), 0, ignore))
        engine = await InProcessEngine.start(build)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


def generate(
    engine: InProcessEngine, prompt: list[int], request_id: str = "a", **params
) -> AsyncGenerator[RequestOutput, None]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, "seed": 0, **params})
    return engine.generate(Submit(request_id, prompt, params))


async def read(outputs: AsyncGenerator[RequestOutput, None]) -> list[int]:
    tokens = []
    async for output in outputs:
        tokens += output.token_ids
        last = output
    assert last.finish_reason is not None
    return tokens


def expected(prompt: list[int], **params) -> list[int]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, "seed": 0, **params})
    return expected_tokens(prompt, params, FAKE, context_length=fake_engine.MAX_MODEL_LEN)


async def until_idle(engine: InProcessEngine) -> None:
    def is_idle() -> bool:
        stats = engine.stats[0]
        return not (stats.num_running or stats.num_waiting or stats.kv_usage)

    await until(is_idle)


async def test_outputs_have_the_tokens_of_the_model(start) -> None:
    engine = await start()
    assert await read(generate(engine, [1, 2, 3])) == expected([1, 2, 3])
    assert engine.ready.vocab_size == FAKE.vocab_size


async def test_concurrent_requests_get_the_same_tokens_as_alone(start) -> None:
    """The block pool is too small for all requests, so some are preempted."""
    engine = await start(config(cache=CacheConfig(num_blocks=24)))
    prompts = [[i] * (1 + i % 40) for i in range(40)]
    completions = await asyncio.gather(
        *(read(generate(engine, p, f"r{i}", max_tokens=5 + i)) for i, p in enumerate(prompts))
    )
    assert completions == [expected(p, max_tokens=5 + i) for i, p in enumerate(prompts)]
    assert engine.stats[0].total_preemptions > 0
    await until_idle(engine)


async def test_the_seed_determines_the_tokens(start) -> None:
    engine = await start()
    completions = [
        await read(generate(engine, [1, 2], f"r{seed}", temperature=1.0, seed=seed))
        for seed in (5, 6, 5)
    ]
    assert completions[0] == completions[2] == expected([1, 2], temperature=1.0, seed=5)
    assert completions[0] != completions[1]


async def test_closing_the_generator_frees_its_blocks_and_request_id(start) -> None:
    engine = await start(config("fake:step_s=0.001"))
    outputs = generate(engine, [1] * 100, max_tokens=900)
    await anext(outputs)
    await outputs.aclose()
    await until_idle(engine)
    # The ID can be used again.
    assert await read(generate(engine, [1, 2, 3])) == expected([1, 2, 3])


async def test_abort_ends_a_request(start) -> None:
    engine = await start(config("fake:step_s=0.001"))
    outputs = generate(engine, [1] * 100, max_tokens=900)
    await anext(outputs)
    engine.abort(["a", "unknown"])
    rest = [output async for output in outputs]
    assert rest[-1].finish_reason == FinishReason.ABORT
    await until_idle(engine)


async def test_rejects_an_id_in_use(start) -> None:
    engine = await start(config("fake:step_s=0.001"))
    first = generate(engine, [1], max_tokens=900)
    await anext(first)
    with pytest.raises(InvalidRequestError, match="in use"):
        await anext(generate(engine, [2]))
    await first.aclose()


async def test_a_slow_reader_gets_pending_outputs_as_one(start) -> None:
    engine = await start()
    outputs = generate(engine, [7], max_tokens=50)
    tokens = list((await anext(outputs)).token_ids)
    await until(lambda: engine.stats[0].total_generation_tokens >= 50)
    rest = [output async for output in outputs]
    assert len(rest) <= 1  # none if all arrived before the first read
    for output in rest:
        tokens += output.token_ids
        assert output.finish_reason == FinishReason.LENGTH
    assert tokens == expected([7], max_tokens=50)


async def test_a_failing_step_fails_every_request(start) -> None:
    engine = await start(config("fake:fail_on_step=5"))
    results = await asyncio.gather(
        *(read(generate(engine, [i], f"r{i}")) for i in range(3)), return_exceptions=True
    )
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert "asked to fail" in str(results[0])
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await read(generate(engine, [1], "later"))


async def test_closing_fails_requests_in_flight(start) -> None:
    engine = await start(config("fake:step_s=0.001"))
    reading = asyncio.create_task(read(generate(engine, [1], max_tokens=900)))
    await until(lambda: engine.stats[0].num_running)
    await engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await reading
    await engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.check_health()


async def test_start_raises_the_error_of_the_factory() -> None:
    def build() -> BuiltEngine:
        raise ConfigError("impossible")

    with pytest.raises(ConfigError, match="impossible"):
        await InProcessEngine.start(build)


async def test_the_event_loop_is_free_while_a_step_runs(start) -> None:
    gate = threading.Event()
    ready = fake_engine.build(config(), 0, ignore).ready

    def build() -> BuiltEngine:
        scheduler = Scheduler(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=64,
            num_blocks=16,
            block_size=16,
        )
        runner = FakeRunner(FAKE, num_blocks=16, block_size=16, gate=gate)
        return BuiltEngine(EngineCore(scheduler, runner, depth=2), ready)

    engine = await start(build=build)
    reading = asyncio.create_task(read(generate(engine, [1])))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not reading.done()
    gate.set()
    assert await reading == expected([1])


async def test_a_request_that_does_not_fit_ends_with_an_error(start) -> None:
    small = config(cache=CacheConfig(num_blocks=4), scheduler=SchedulerConfig(max_num_seqs=2))
    engine = await start(small)
    outputs = [output async for output in generate(engine, [1] * 500)]
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
