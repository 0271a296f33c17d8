"""An engine factory without jax: the real core on a fake runner.

Run it with ``--engine-factory jaxserve.testing.fake_engine:build --model fake``. The model name may
have options, as in ``fake:vocab=300,step_s=0.01,eos_after=5,fail_on_step=9`` (see `FakeModel`).
Sizes come from the config, or from the constants below.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.plan import Runner, Sizes
from jaxserve.engine.core import BuiltEngine, assemble
from jaxserve.ipc.messages import Decision, Progress
from jaxserve.testing import ngram_reference
from jaxserve.testing.fake_model import FakeModel
from jaxserve.testing.fake_runner import FakeRunner

MAX_MODEL_LEN = 1024
NUM_BLOCKS = 512
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512


def build(
    config: EngineConfig, engine: int, on_progress: Callable[[Progress], None]
) -> BuiltEngine:
    """Builds engine number ``engine``.

    Raises:
      ConfigError: the model name has options that a fake model does not know.
    """
    model = FakeModel.parse(config.model.model)

    def make_runner(sizes: Sizes) -> Runner:
        return FakeRunner(
            model,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            propose=ngram_reference.propose,
        )

    return build_around(
        make_runner,
        config,
        engine,
        on_progress,
        vocab_size=model.vocab_size,
        hidden_size=model.width,
    )


def build_around(
    make_runner: Callable[[Sizes], Runner],
    config: EngineConfig,
    engine: int,
    on_progress: Callable[[Progress], None],
    *,
    vocab_size: int,
    hidden_size: int = FakeModel().width,
) -> BuiltEngine:
    """Builds engine number ``engine`` on the runner that ``make_runner`` returns for its sizes."""
    on_progress(Progress(engine, "load weights", 0, 2, "tensors"))
    on_progress(Progress(engine, "load weights", 2, 2, "tensors", seconds=0.0))
    sizes = _sizes(config)
    runner = make_runner(sizes)
    on_progress(Progress(engine, "compile", 1, 1, "programs", seconds=0.0))
    return assemble(
        config,
        engine,
        runner,
        sizes,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        decisions=[Decision("model", "fake", "its tokens are arithmetic")],
    )


def _sizes(config: EngineConfig) -> Sizes:
    block_size = config.cache.block_size
    num_blocks = config.cache.num_blocks or NUM_BLOCKS
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
    max_drafts = config.speculation.max_drafts
    groups = CacheGroups((None,), block_size, max_num_batched_tokens, max_drafts)
    return Sizes(
        max_model_len=groups.longest(num_blocks - 1, config.model.max_model_len or MAX_MODEL_LEN),
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs or MAX_NUM_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
        max_drafts=max_drafts,
    )
