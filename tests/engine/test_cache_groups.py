"""Models whose layers have different windows: what they give back changes no token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.core.kv_cache_manager import KVCacheManager
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.factory import build
from jaxserve.ipc.messages import Submit
from jaxserve.models.cache_layout import CacheLayout
from jaxserve.models.registry import read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.tiny import tiny_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("compile_quickly")

WINDOW = 9
NUM_OUTPUT = 36
CONFIGS = {
    "gemma3": tiny_config(
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        num_hidden_layers=7,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        rope_parameters=None,
        query_pre_attn_scalar=16,
    ),
    "mistral": tiny_config("MistralForCausalLM", sliding_window=WINDOW),
}
GROUPS = {"gemma3": (WINDOW, WINDOW, WINDOW, None), "mistral": (WINDOW,)}
NUM_BLOCKS = {"gemma3": 56, "mistral": 9}
"""Little more than one request of the full context needs."""


def make_engine(
    model: Path, loop: str, *, num_blocks: int, num_rows: int, max_tokens: int
) -> BuiltEngine:
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_model_len=128, dtype="float32"),
        cache=CacheConfig(num_blocks=num_blocks, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=max_tokens),
        compile=CompileConfig(layer_loop=loop, warmup=False, compilation_cache_dir=""),
    )
    return build(config, 0, lambda _: None)


def generate(built: BuiltEngine) -> list[list[int]]:
    """Returns the greedy tokens of seven prompts, some of them much longer than a window."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 512, length).tolist() for length in (70, 5, 88, 6, 7, 61, 30)]
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, seed=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        built.core.add(Submit(str(i), prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while built.core.has_work:
        for output in built.core.step(0.0):
            tokens[int(output.request_id)] += output.token_ids
    return tokens


def one_group(spec: ModelSpec) -> CacheLayout:
    return CacheLayout((None,), spec.num_layers, tuple((0, i) for i in range(spec.num_layers)))


@pytest.mark.parametrize(
    ("family", "loops"), [("gemma3", ["scan", "unroll"]), ("mistral", ["scan"])]
)
def test_giving_blocks_back_changes_no_token(family, loops, tmp_path, monkeypatch):
    """Compares with one group that keeps every block, and one request at a time in one chunk."""
    model = write_checkpoint(tmp_path / "tiny", CONFIGS[family])
    with monkeypatch.context() as patch:
        patch.setattr(ModelSpec, "cache_layout", property(one_group))
        whole = make_engine(model, "scan", num_blocks=40, num_rows=1, max_tokens=100)
        expected = generate(whole)
    assert whole.core.stats().total_preemptions == 0
    assert [len(tokens) for tokens in expected] == [NUM_OUTPUT] * len(expected)
    assert len({token for tokens in expected for token in tokens}) > 60

    counts: Counter[str] = Counter()
    allocate = KVCacheManager.allocate

    def counting_allocate(self, request, num_tokens):
        updates = allocate(self, request, num_tokens)
        counts["given back"] += sum(not any(update.block_ids) for update in updates or ())
        return updates

    monkeypatch.setattr(KVCacheManager, "allocate", counting_allocate)
    assert read_spec(CONFIGS[family]).cache_layout.windows == GROUPS[family]
    for loop in loops:
        counts.clear()
        small = make_engine(model, loop, num_blocks=NUM_BLOCKS[family], num_rows=3, max_tokens=12)
        assert generate(small) == expected
        stats = small.core.stats()
        assert stats.total_preemptions > 0
        assert stats.kv_usage == 0
        assert counts["given back"] > 50
