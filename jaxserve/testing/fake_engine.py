"""A factory of engines without jax: the real core on a fake runner.

``--model fake`` or, with options, ``fake:vocab=300,step_s=0.01,eos_after=5,fail_on_step=9``
(see `FakeModel`). Sizes come from the config, or from the constants here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.core.limits import context_length
from jaxserve.core.plan import Runner
from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.built import BuiltEngine
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import Progress, Ready
from jaxserve.testing.fake_runner import POOLED_WIDTH, FakeModel, FakeRunner

MAX_MODEL_LEN = 1024
NUM_BLOCKS = 512
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512


def build(
    config: EngineConfig, engine: int, on_progress: Callable[[Progress], None]
) -> BuiltEngine:
    """Builds engine number ``engine``.

    Raises:
      ConfigError: the name of the model has options that a fake does not know.
    """
    model = FakeModel.parse(config.model.model)

    def make_runner(num_blocks: int, block_size: int) -> Runner:
        return FakeRunner(model, num_blocks=num_blocks, block_size=block_size)

    return build_around(make_runner, config, engine, on_progress, vocab_size=model.vocab_size)


def build_around(
    make_runner: Callable[[int, int], Runner],
    config: EngineConfig,
    engine: int,
    on_progress: Callable[[Progress], None],
    *,
    vocab_size: int,
) -> BuiltEngine:
    """Builds engine number ``engine`` on the runner for so many blocks of a size."""
    on_progress(Progress(engine, "load weights", 0, 2, "tensors"))
    on_progress(Progress(engine, "load weights", 2, 2, "tensors", seconds=0.0))
    block_size = config.cache.block_size
    num_blocks = config.cache.num_blocks or NUM_BLOCKS
    max_model_len = context_length(
        max_model_len=config.model.max_model_len or MAX_MODEL_LEN,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    max_num_seqs = config.scheduler.max_num_seqs or MAX_NUM_SEQS
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        policy=config.scheduler.policy,
    )
    runner = make_runner(num_blocks, block_size)
    on_progress(Progress(engine, "compile", 1, 1, "programs", seconds=0.0))
    ready = Ready(
        engine=engine,
        pid=os.getpid(),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        hidden_size=POOLED_WIDTH,
        max_logprobs=config.logprobs.limit(vocab_size),
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        decisions=[("model", "fake", "its tokens are arithmetic")],
        num_compilations=runner.num_compilations,
    )
    depth = 2 if config.scheduler.async_scheduling else 1
    return BuiltEngine(EngineCore(scheduler, runner, depth=depth), ready)
