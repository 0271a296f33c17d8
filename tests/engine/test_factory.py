"""Building an engine: decisions, warm-up, caches, and settings that are rejected."""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.checkpoint.locate import open_tokenizer
from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.factory import build
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Progress, Submit
from jaxserve.sampling.declaration import Parameter, Stage
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.testing.tiny import tiny_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("compile_quickly")

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_traceback_in_locations_limit",
)


@pytest.fixture(autouse=True)
def _restore_jax_options() -> Iterator[None]:
    """Restores the options of jax that `build` sets, since the tests share one process."""
    before = {option: getattr(jax.config, option) for option in OPTIONS}
    yield
    for option, value in before.items():
        jax.config.update(option, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "tiny")
    return EngineConfig(
        model=ModelConfig(model=str(folder / "tiny"), max_model_len=64, dtype="float32"),
        cache=CacheConfig(num_blocks=33, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
        compile=CompileConfig(compilation_cache_dir=str(folder / "compiled")),
    )


def generate(built: BuiltEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Returns eight greedy tokens for each prompt."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=8, seed=0)
        built.core.add(Submit(str(i), prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while built.core.has_work:
        for output in built.core.step(time.monotonic()):
            tokens[int(output.request_id)] += output.token_ids
    return tokens


def cached_programs(folder: Path) -> set[str]:
    """Returns the names of the files of compiled steps and samplers in a folder."""
    return {path.name for path in folder.glob("jit_*step-*.program")}


PROMPTS = [[5, 6, 7], list(range(40)), [300]]


def test_builds_an_engine_as_configured_and_the_next_start_compiles_nothing(config):
    reports: list[Progress] = []
    built = build(config, 1, reports.append)
    ready = built.ready
    assert (ready.engine, ready.max_model_len, ready.vocab_size) == (1, 64, 512)
    assert (ready.block_size, ready.num_blocks) == (4, 33)
    assert (ready.max_num_seqs, ready.max_num_batched_tokens) == (2, 16)
    decided = {what: value for what, value, _ in ready.decisions}
    assert decided["model"] == "tiny"
    assert decided["dtype"] == "float32"
    assert decided["attention"] == "xla"
    assert decided["layers"] == "scan"
    assert {"device", "context", "KV cache", "compiled programs"} <= set(decided)

    ended = [report for report in reports if report.seconds is not None]
    assert [report.phase for report in ended] == ["load weights", "allocate KV cache", "compile"]
    assert all(report.done == report.total > 0 for report in ended)
    assert ended[-1].total == built.core.stats().total_compilations

    num_compilations = built.core.stats().total_compilations
    tokens = generate(built, PROMPTS)
    assert [len(each) for each in tokens] == [8, 8, 8]
    assert built.core.stats().total_compilations == num_compilations

    folder = Path(config.compile.compilation_cache_dir)
    assert folder.stat().st_mode & 0o077 == 0
    programs = cached_programs(folder)
    assert len(programs) == num_compilations
    jax.clear_caches()
    again = build(config, 0, reports.append)
    assert cached_programs(folder) == programs
    assert generate(again, PROMPTS) == tokens


def swap_letters(path: Path) -> None:
    """Swaps lower-case and upper-case letters in a tokenizer, without a change of its size."""
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    for letter in "abcdef":
        other = letter.upper()
        vocab[letter], vocab[other] = vocab[other], vocab[letter]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("change", ["overwrite", "remove"])
def test_changed_files_of_the_model_change_nothing(config, tmp_path, loop, change):
    """Weights and tokenizer are those of the start, even for the first grammar."""
    folder = shutil.copytree(config.model.model, tmp_path / "tiny")
    model = dataclasses.replace(config.model, model=str(folder))
    program = CompileConfig(layer_loop=loop, warmup=False, compilation_cache_dir="")
    built = build(dataclasses.replace(config, model=model, compile=program), 0, lambda _: None)
    tokens = generate(built, PROMPTS)
    tokenizer = open_tokenizer(str(folder))
    if change == "overwrite":
        swap_letters(folder / "tokenizer.json")
        for path in folder.glob("*.safetensors"):
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.seek(size // 4)
                file.write(bytes([60]) * (size - size // 4))
    else:
        shutil.rmtree(folder)
    assert generate(built, PROMPTS) == tokens
    grammar = Grammar("regex", "[a-f]{3,9}")
    params = SamplingParams(temperature=0, max_tokens=20, seed=0, grammar=grammar)
    built.core.add(Submit("x", tokenizer.encode("abc"), params, tokenizer.eos_token_id))
    ids: list[int] = []
    while built.core.has_work:
        for output in built.core.step(time.monotonic()):
            ids += output.token_ids
    assert re.fullmatch("[a-f]{3,9}", tokenizer.decode(ids))


def test_layer_loop_and_async_scheduling_do_not_change_the_tokens(config):
    tokens = []
    for loop, overlapped in [("scan", False), ("unroll", True)]:
        scheduler = dataclasses.replace(config.scheduler, async_scheduling=overlapped)
        program = CompileConfig(layer_loop=loop, warmup=False, compilation_cache_dir="")
        changed = dataclasses.replace(config, scheduler=scheduler, compile=program)
        tokens.append(generate(build(changed, 0, lambda _: None), PROMPTS))
    assert tokens[0] == tokens[1]


def test_quantised_weights_are_smaller_and_kept_apart_in_the_cache(config, tmp_path):
    cold = CompileConfig(warmup=False, compilation_cache_dir="")
    values, sizes, tokens = [], [], []
    for quantization in (None, "dense", "int8", "int8"):
        model = dataclasses.replace(
            config.model, quantization=quantization, weights_cache=str(tmp_path / "weights")
        )
        changed = dataclasses.replace(config, compile=cold, model=model)
        built = build(changed, 0, lambda _: None)
        decided = {what: (value, why) for what, value, why in built.ready.decisions}
        value, why = decided["quantization"]
        values.append((value, decided["weights"][0]))
        asked, size = re.fullmatch(r"(.+); ([\d.]+) MiB of weights", why).groups()
        assert asked == ("as asked" if quantization else "the default")
        sizes.append(float(size))
        tokens.append(generate(built, PROMPTS))
    assert values == [
        ("dense", "converted"),
        ("dense", "restored"),
        ("int8", "converted"),
        ("int8", "restored"),
    ]
    assert sizes[0] == sizes[1] > 3 * sizes[2]
    assert sizes[2] == sizes[3] > 0
    assert tokens[0] == tokens[1]
    assert tokens[2] == tokens[3]
    assert [len(each) for each in tokens[2]] == [8, 8, 8]


def test_rejects_an_unknown_quantization(config):
    unknown = dataclasses.replace(config.model, quantization="int3")
    with pytest.raises(ConfigError, match="--quantization must be one of dense, int8, got 'int3'"):
        build(dataclasses.replace(config, model=unknown), 0, lambda _: None)


def test_compiles_nothing_at_the_start_without_warm_up(config):
    cold = dataclasses.replace(
        config, compile=CompileConfig(warmup=False, compilation_cache_dir="")
    )
    built = build(cold, 0, lambda _: None)
    assert built.core.stats().total_compilations == 0
    assert ("compiled programs", "not kept", "as asked") in built.ready.decisions


def test_starts_without_a_cache_if_its_folder_cannot_be_created(config, tmp_path):
    (tmp_path / "file").touch()
    blocked = CompileConfig(warmup=False, compilation_cache_dir=str(tmp_path / "file" / "in"))
    ready = build(dataclasses.replace(config, compile=blocked), 0, lambda _: None).ready
    (why,) = [why for what, _, why in ready.decisions if what == "compiled programs"]
    assert why.startswith(f"cannot make {tmp_path}")


def test_restored_weights_give_the_same_tokens_as_converted_weights(config, tmp_path):
    cold = CompileConfig(warmup=False, compilation_cache_dir="")
    model = dataclasses.replace(config.model, weights_cache=str(tmp_path / "weights"))
    changed = dataclasses.replace(config, compile=cold, model=model)
    tokens = [generate(build(dataclasses.replace(changed, model=config.model), 0, print), PROMPTS)]
    sources = []
    for _ in range(2):
        reports: list[Progress] = []
        built = build(changed, 0, reports.append)
        sources += [value for what, value, _ in built.ready.decisions if what == "weights"]
        (loaded,) = [r for r in reports if r.phase == "load weights" and r.seconds is not None]
        assert loaded.done == loaded.total > 0
        tokens.append(generate(built, PROMPTS))
    assert sources == ["converted", "restored"]
    assert tokens[0] == tokens[1] == tokens[2]


def test_layers_with_different_windows_are_unrolled_for_a_backend_with_fixed_windows(
    config, tmp_path
):
    tiny = tiny_config("Gemma2ForCausalLM", sliding_window=8, head_dim=16)
    model = dataclasses.replace(config.model, model=str(write_checkpoint(tmp_path / "tiny", tiny)))
    cold = CompileConfig(warmup=False, compilation_cache_dir="", attention_backend="pallas_triton")
    # The kernels serve blocks of at least 16 slots.
    cache = CacheConfig(num_blocks=33, block_size=16)
    changed = dataclasses.replace(config, model=model, compile=cold, cache=cache)
    decided = {what: (value, why) for what, value, why in build(changed, 0, print).ready.decisions}
    assert decided["layers"] == ("unroll", "the layers differ in their attention window")
    looped = dataclasses.replace(changed, compile=dataclasses.replace(cold, layer_loop="scan"))
    with pytest.raises(ConfigError, match="pallas_triton cannot run such layers in a loop"):
        build(looped, 0, print)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_chooses_the_dtype_by_the_instructions_of_the_cpu(config, auto_chooses, dtype):
    auto_chooses(dtype)
    model = dataclasses.replace(config.model, dtype="auto")
    cold = CompileConfig(warmup=False, compilation_cache_dir="")
    built = build(dataclasses.replace(config, model=model, compile=cold), 0, lambda _: None)
    decided = {what: (value, why) for what, value, why in built.ready.decisions}
    instructions = {"float32": "no bfloat16", "bfloat16": "bfloat16"}[dtype]
    assert decided["dtype"] == (dtype, f"this CPU has {instructions} instructions")
    assert [len(tokens) for tokens in generate(built, PROMPTS)] == [8, 8, 8]


@pytest.mark.parametrize(
    ("asked", "dtype"), [("auto", "float32"), ("int8", "int8"), ("fp8_e4m3", "float8_e4m3fn")]
)
def test_an_8_bit_cache_has_more_blocks_in_the_same_memory(config, asked, dtype):
    """With heads of 16 numbers, an int8 vector takes 20 bytes with its scale, instead of 64."""
    cache = CacheConfig(block_size=4, kv_cache_memory_mib=1, kv_cache_dtype=asked)
    scheduler = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=512)
    cold = CompileConfig(warmup=False, compilation_cache_dir="")
    changed = dataclasses.replace(config, cache=cache, scheduler=scheduler, compile=cold)
    built = build(changed, 0, lambda _: None)
    decided = {what: (value, why) for what, value, why in built.ready.decisions}
    assert decided["KV cache dtype"][0] == dtype
    assert (decided["KV cache dtype"][1] == "as asked") == (asked != "auto")
    assert decided["KV cache"][1] == "1 MiB, as asked"
    head_dim, per_vector = 16, {"float32": 64, "int8": 20, "float8_e4m3fn": 16}[dtype]
    config_json = tiny_config()
    assert config_json["head_dim"] == head_dim
    vectors = 2 * config_json["num_hidden_layers"] * config_json["num_key_value_heads"]
    assert built.ready.num_blocks == 2**20 // (vectors * per_vector * 4) + 1
    assert [len(tokens) for tokens in generate(built, PROMPTS)] == [8, 8, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": {"policy": "nope"}}, "--policy must be one of fcfs, .*got 'nope'"),
        (
            {"cache": {"num_blocks": 3}, "model": {"max_model_len": 64}},
            r"--max-model-len 64 does not fit .* of 3 blocks \(as asked\); .* fits is 8",
        ),
        ({"model": {"max_model_len": 257}}, "--max-model-len 257 is more than .* context of 256"),
        ({"scheduler": {"max_num_batched_tokens": 1}}, "--max-num-batched-tokens 1 must be at"),
        ({"model": {"quantization": "int3"}}, "--quantization must be one of"),
        ({"cache": {"kv_cache_dtype": "fp4"}}, "--kv-cache-dtype must be one of"),
    ],
)
def test_rejects_a_setting_before_it_loads_the_weights(config, changes, message):
    changed = {
        group: dataclasses.replace(getattr(config, group), **values)
        for group, values in changes.items()
    }
    reports: list[Progress] = []
    with pytest.raises(ConfigError, match=message):
        build(dataclasses.replace(config, **changed), 0, reports.append)
    assert reports == []


def test_rejects_an_unknown_dtype_of_the_cache(config):
    cache = dataclasses.replace(config.cache, kv_cache_dtype="fp4")
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be one of auto, .*got 'fp4'"):
        build(dataclasses.replace(config, cache=cache), 0, lambda _: None)


def test_a_stage_of_every_request_leaves_no_drafts(config):
    always = Stage(name="always", apply=lambda logits, rows: logits)
    cold = CompileConfig(warmup=False, compilation_cache_dir="")
    speculation = SpeculationConfig(speculative="ngram")
    drafting = dataclasses.replace(config, compile=cold, speculation=speculation)
    with pytest.raises(ConfigError, match="--speculative cannot be combined with the stage always"):
        build(drafting, 0, print, logits_processors=[always])
    used = Stage(
        name="used", apply=always.apply, parameters=(Parameter("used", "bool", default=False),)
    )
    built = build(drafting, 0, print, logits_processors=[used])
    assert [each.name for each in built.ready.parameters][-1:] == ["used"]


def test_a_stage_that_fails_on_some_numbers_of_rows_is_refused_without_a_warm_up(config):
    def apply(logits, rows):
        if len(logits) > 2:
            raise RuntimeError("many rows")
        return logits

    late = Stage(name="late", apply=apply, warm_up=False)
    cold = CompileConfig(warmup=False, compilation_cache_dir="")
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
    four_rows = dataclasses.replace(config, compile=cold, scheduler=scheduler)
    with pytest.raises(ConfigError, match="stage late failed on logits .*RuntimeError: many rows"):
        build(four_rows, 0, print, logits_processors=[late])


def test_rejects_a_max_model_len_that_is_too_long(config):
    too_long = dataclasses.replace(config.model, max_model_len=100_000)
    with pytest.raises(ConfigError, match="--max-model-len 100000"):
        build(dataclasses.replace(config, model=too_long), 0, lambda _: None)
