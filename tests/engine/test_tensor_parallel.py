"""Engines on four simulated devices: the results of one device, and settings that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.factory import build
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.llm import LLM
from jaxserve.sampling.declaration import Parameter, Stage, StageRows
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.one_step import logits_of
from jaxserve.testing.tiny import random_tensors, scripted_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tolerance import of_model

pytestmark = pytest.mark.usefixtures("compile_quickly")

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    # Biases of every layer, also where the devices add up their products.
    "llama": tiny_config(**HEADS, attention_bias=True, mlp_bias=True),
    # The embedding is the head too, and four devices cannot share its tokens equally.
    "gemma3": tiny_config(
        "Gemma3ForCausalLM",
        **HEADS,
        vocab_size=514,
        tie_word_embeddings=None,
        sliding_window=9,
        sliding_window_pattern=2,
    ),
    # The embedding is the head too, and its tokens are shared.
    "qwen2": tiny_config("Qwen2ForCausalLM", **HEADS, tie_word_embeddings=True),
}


def sampling(max_tokens: int, **changes: Any) -> SamplingParams:
    """Returns parameters as an engine receives them, greedy by default."""
    defaults = {"temperature": 0, "seed": 0, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, **{**defaults, **changes})


REQUESTS: dict[str, tuple[int, SamplingParams]] = {
    "greedy": (3, sampling(24)),
    "sampled": (8, sampling(24, temperature=0.9, seed=1)),
    "filtered": (13, sampling(24, temperature=0.8, top_p=0.8, seed=2)),
    "scored": (18, sampling(12, logprobs=3, prompt_logprobs=2)),
    "long": (41, sampling(24, temperature=0.9, seed=3)),
}
"""Length of the prompt and parameters of each request."""


def scale(logits: Any, rows: StageRows) -> Any:
    """Multiplies the logits by a factor."""
    return logits * rows["factor"][:, None]


def lower_newest(logits: Any, rows: StageRows) -> Any:
    """Lowers the logit of the newest token."""
    return logits.at[jnp.arange(len(logits)), rows.tokens[:, -1]].add(-rows["lower"], mode="drop")


SCALE = Stage(
    name="scale", apply=scale, parameters=(Parameter("factor", "float", 1.0),), is_filter=True
)
LOWER = Stage(
    name="lower", apply=lower_newest, parameters=(Parameter("lower", "float", 0.0),), num_tokens=1
)


@pytest.fixture(autouse=True)
def _restore_jax_options() -> Iterator[None]:
    """Restores the option of jax that `build` sets, since the tests share one process."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_checkpoint(folder, CONFIGS[request.param])


def config(checkpoint: Path, num_devices: int, **compile: Any) -> EngineConfig:
    """The cache is too small for all requests, and the long prompt takes several steps."""
    compile = {"compilation_cache_dir": "", "warmup": False, **compile}
    return EngineConfig(
        model=ModelConfig(model=str(checkpoint), max_model_len=96, dtype="float32"),
        cache=CacheConfig(num_blocks=33, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        parallel=ParallelConfig(tensor_parallel_size=num_devices),
        compile=CompileConfig(**compile),
    )


@dataclasses.dataclass
class Answer:
    """The outputs of a request: tokens, and values that two runs round differently."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)


def answers(built: BuiltEngine) -> dict[str, Answer]:
    """Runs `REQUESTS` and a request for an embedding."""
    core = built.core
    rng = np.random.default_rng(0)
    requests = {**REQUESTS, "embedded": (9, sampling(1, pooling="mean"))}
    for name, (length, params) in requests.items():
        core.add(Submit(name, rng.integers(5, 500, length).tolist(), params))
    found = {name: Answer() for name in requests}
    now = 0.0
    while core.has_work:
        for output in core.step(now):
            answer = found[output.request_id]
            answer.tokens += output.token_ids
            scores = [*(output.logprobs or []), *(output.prompt_logprobs or [])]
            answer.values += [value for one in scores if one for value in one.logprobs]
            answer.values += output.embedding or []
        now += 1.0
    return found


def test_four_devices_answer_like_one(checkpoint: Path) -> None:
    """A mixed batch with chunked prefill and preemption: all tokens are those of one device."""
    one, four = (build(config(checkpoint, n), 0, lambda _: None) for n in (1, 4))
    expected, found = answers(one), answers(four)
    assert {name: answer.tokens for name, answer in found.items()} == {
        name: answer.tokens for name, answer in expected.items()
    }
    assert [len(expected[name].tokens) for name in REQUESTS] == [24, 24, 24, 12, 24]
    assert min(built.core.stats().total_preemptions for built in (one, four)) > 0
    model = CONFIGS[checkpoint.name]
    for name in ("scored", "embedded"):
        wanted = expected[name].values
        atol = of_model(model, 41, scale=float(np.abs(wanted).max()))
        np.testing.assert_allclose(found[name].values, wanted, rtol=0, atol=atol)
        assert len(wanted) > 40


def test_four_devices_find_logits_that_are_not_finite(tmp_path: Path) -> None:
    """A damaged embedding of one token, which only one device holds."""
    tiny = CONFIGS["llama"]
    tensors = random_tensors(tiny)
    tensors["model.embed_tokens.weight"][300] = np.nan
    folder = write_checkpoint(tmp_path / "damaged", tiny, tensors)
    core = build(config(folder, 4), 0, lambda _: None).core
    prompts = {"bad": [7, 300, 9], "good": [7, 8, 9], "also bad": [300, 7, 8]}
    for name, prompt in prompts.items():
        core.add(Submit(name, prompt, sampling(3, temperature=1.0 if name == "bad" else 0)))
    reasons: dict[str, int | None] = {}
    while core.has_work:
        for output in core.step(0.0):
            reasons[output.request_id] = output.finish_reason
    assert reasons == {
        "bad": FinishReason.ERROR,
        "good": FinishReason.LENGTH,
        "also bad": FinishReason.ERROR,
    }


def test_drafts_on_four_devices_change_no_token(tmp_path: Path) -> None:
    """Tokens 5, 6 and 7 follow each other, in prompts and completions; all others are random."""
    tiny = tiny_config(**HEADS, hidden_size=512)
    tensors = scripted_tensors(tiny, {5: 6, 6: 7, 7: 5})
    folder = write_checkpoint(tmp_path / "scripted", tiny, tensors)
    speculation = SpeculationConfig(speculative="ngram", num_speculative_tokens=3)
    drafting = dataclasses.replace(config(folder, 4), speculation=speculation)
    # Two of four rows are free for drafts.
    prompts = [[5, 6, 7] * 3, [9, 10, 11]]
    tokens: list[list[list[int]]] = []
    engines = [build(each, 0, lambda _: None) for each in (config(folder, 1), drafting)]
    for built in engines:
        tokens.append([[] for _ in prompts])
        for i, prompt in enumerate(prompts):
            params = sampling(24, temperature=0.9 * (i % 2), seed=i)
            built.core.add(Submit(str(i), prompt, params))
        while built.core.has_work:
            for output in built.core.step(0.0):
                tokens[-1][int(output.request_id)] += output.token_ids
    assert tokens[0] == tokens[1]
    assert [len(each) for each in tokens[0]] == [24] * len(prompts)
    one, four = (built.core.stats() for built in engines)
    assert one.total_draft_tokens == 0
    assert sum(four.accepted_per_position) > 10


def test_warm_up_compiles_everything_and_the_decisions_name_the_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    built = build(
        config(folder, 4, warmup=True), 0, lambda _: None, logits_processors=[SCALE, LOWER]
    )
    before = built.core.stats().total_compilations
    assert before > 10
    for i, (length, params) in enumerate(REQUESTS.values()):
        if params.top_p == 1.0:  # filters are compiled for small values of top_k only
            built.core.add(Submit(str(i), list(range(5, 5 + length)), params))
    for name, params in {
        "processed": sampling(4, extra_args={"lower": 1.0}),
        "filtered": sampling(4, temperature=0.9, extra_args={"factor": 1.5}),
    }.items():
        built.core.add(Submit(name, list(range(9)), params))
    # Nothing is sent from one device to another, but for the sums within programs.
    with jax.transfer_guard_device_to_device("disallow"):
        while built.core.has_work:
            built.core.step(0.0)
    assert built.core.stats().total_compilations == before
    decided = {what: (value, why) for what, value, why in built.ready.decisions}
    assert decided["tensor parallel"] == (
        "4 devices",
        "as asked; each holds 0.1 of 0.6 MiB of weights",
    )


def test_cached_weights_serve_any_number_of_devices(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    tokens, sources = [], []
    for count in (1, 4):
        asked = config(folder, count)
        kept = dataclasses.replace(asked.model, weights_cache=str(tmp_path / "weights"))
        built = build(dataclasses.replace(asked, model=kept), 0, lambda _: None)
        sources += [value for what, value, _ in built.ready.decisions if what == "weights"]
        built.core.add(Submit("0", [7, 8, 9], REQUESTS["greedy"][1]))
        tokens.append([])
        while built.core.has_work:
            for output in built.core.step(0.0):
                tokens[-1] += output.token_ids
    assert sources == ["converted", "restored"]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 24


def test_integers_of_8_bits_on_four_devices_are_close_to_one(tmp_path: Path) -> None:
    """Not equal: the inputs of a product are rounded by the largest that a device has."""
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    scores = []
    for count in (1, 4):
        asked = config(folder, count)
        model = dataclasses.replace(asked.model, quantization="int8")
        built = build(dataclasses.replace(asked, model=model), 0, lambda _: None)
        built.core.add(Submit("0", list(range(5, 35)), sampling(1, prompt_logprobs=0)))
        while built.core.has_work:
            for output in built.core.step(0.0):
                found = output.prompt_logprobs or []
                scores.append([one.logprobs[0] for one in found if one is not None])
    assert len(scores[0]) == 29
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=2e-3)


def test_llm_runs_on_several_devices(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 33}
    with LLM(
        str(folder),
        show_progress=False,
        dtype="float32",
        tensor_parallel_size=4,
        warmup=False,
        compilation_cache_dir="",
        **settings,
    ) as llm:
        prompt = [5, 60, 300, 17]
        (output,) = llm.generate([prompt], sampling(12), use_tqdm=False)
    tokens = output.outputs[0].token_ids
    # The model without an engine, over the whole sequence at once.
    logits = logits_of(folder, [*prompt, *tokens])
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(tokens) == 12


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({"num_key_value_heads": 2}, 4, "must divide the 2 key-value heads of this model, got 4"),
        ({"intermediate_size": 95}, 2, "must divide the 95 columns of the MLP of this model"),
        ({}, 64, "64 needs 64 devices, but jax sees 4"),
    ],
)
def test_rejects_a_number_of_devices_before_it_reads_weights(
    changes: dict[str, int], count: int, message: str, tmp_path: Path
) -> None:
    tensors = {"not_a_weight": np.zeros(1, np.float32)}
    folder = write_checkpoint(tmp_path / "tiny", tiny_config(**{**HEADS, **changes}), tensors)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {message}"):
        build(config(folder, count), 0, lambda _: None)
