"""Builds an engine from its configuration: checkpoint, weights, sizes, KV cache, programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxserve.checkpoint.checkpoint import Checkpoint
from jaxserve.checkpoint.fingerprint import fingerprint
from jaxserve.checkpoint.locate import open_checkpoint, open_tokenizer
from jaxserve.config import GIB, MIB, EngineConfig
from jaxserve.core.plan import Sizes
from jaxserve.device import Device
from jaxserve.engine.choices import Choices, choose
from jaxserve.engine.core import BuiltEngine, assemble
from jaxserve.engine.memory import (
    MORE_MEMORY,
    SMALLER_CACHE,
    SMALLER_STEPS,
    SMALLER_WEIGHTS,
    after_weights,
    check_room_for_steps,
    explained,
)
from jaxserve.engine.sizing import resolve_sizes
from jaxserve.engine.startup import Phase
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Decision, Progress
from jaxserve.models.loading import abstract_params, load_params
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.runner import kv_cache, proposer
from jaxserve.runner.buckets import table_widths
from jaxserve.runner.compilation_cache import keep_compiled_programs
from jaxserve.runner.device import current_device, engine_devices
from jaxserve.runner.placement import Placement, bytes_on_each_device, parts_on_each_device
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling.declaration import Stage
from jaxserve.sampling.registry import check_params, load_stages
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.constraint import GrammarCompiler
from jaxserve.text.model_files import expand_home
from jaxserve.text.tokenizer import Tokenizer


def build(
    config: EngineConfig,
    engine: int,
    on_progress: Callable[[Progress], None],
    *,
    logits_processors: Sequence[str | Stage] | None = None,
) -> BuiltEngine:
    """Builds an engine that is ready to serve.

    Args:
      config: the settings that the user asked for.
      engine: index of the engine among the replicas.
      on_progress: receives progress reports, at least one every few seconds; called from two
        threads, but never concurrently.
      logits_processors: replaces those of the config, which cannot hold objects.

    Raises:
      CheckpointError: the model is missing, damaged or not supported.
      ConfigError: a setting is impossible for this model on this device.
    """
    name = config.speculation.speculative
    propose = None if name is None else proposer.load(name)
    # Both must be set up before jax is used.
    devices = engine_devices(config.parallel.tensor_parallel_size)
    kept = keep_compiled_programs(
        config.compile.compilation_cache_dir, max_bytes=config.compile.compilation_cache_mib * MIB
    )
    with explained("opening the checkpoint", MORE_MEMORY):
        checkpoint = open_checkpoint(config.model.model, names_of=gguf_names)
    files = fingerprint(checkpoint.path)
    spec = read_spec(checkpoint.config)
    # Read now: a grammar must not depend on what happens to the files later.
    tokenizer = _tokenizer(config, checkpoint)
    chosen = choose(config, checkpoint, spec, devices)
    _check_memory(config, spec, chosen)
    stages, stage_decisions = _stages(config, logits_processors, spec, has_drafts=bool(propose))

    phase = functools.partial(Phase, engine, on_progress=on_progress)
    with (
        explained("loading the weights", SMALLER_WEIGHTS),
        phase("load weights", "bytes") as loading,
    ):
        graphdef, params, weights_decisions = _load(
            config.model.weights_cache, checkpoint, spec, chosen, phase=loading
        )
    with (
        explained("allocating the KV cache", SMALLER_CACHE),
        phase("allocate KV cache", "bytes") as allocating,
    ):
        sizes, kv = _allocate(config, spec, chosen, allocating)
    decisions = [*chosen.decisions, *stage_decisions, *weights_decisions]
    if chosen.placement.num_devices > 1:
        decisions.append(_cut_decision(params, chosen.placement))
    decisions += [*sizes.decisions, kept]
    runner = ModelRunner(
        functools.partial(nnx.merge, graphdef),
        params,
        kv,
        attention=chosen.backend,
        sizes=sizes,
        vocab_size=spec.vocab_size,
        table_widths=table_widths(sizes.max_model_len, sizes.block_size),
        logprobs_mode=config.logprobs.logprobs_mode,
        stages=stages,
        placement=chosen.placement,
        propose=propose,
        checks_finite=config.sampling.on_nonfinite == "error",
    )
    if config.compile.warmup:
        with explained("running steps", SMALLER_STEPS), phase("compile", "programs") as compiling:
            runner.warm_up(compiling.update)
    grammars = GrammarCompiler(tokenizer, spec.vocab_size)
    return assemble(
        config,
        engine,
        runner,
        sizes,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        decisions=decisions,
        compile_grammar=grammars.start,
        parameters=tuple(parameter for stage in stages for parameter in stage.parameters),
        check_params=functools.partial(check_params, stages),
        step_costs=runner.step_costs,
        fingerprint=files,
    )


def _stages(
    config: EngineConfig,
    logits_processors: Sequence[str | Stage] | None,
    spec: ModelSpec,
    *,
    has_drafts: bool,
) -> tuple[tuple[Stage, ...], list[Decision]]:
    """Returns the stages of the sampler, and a decision if the user added some.

    Raises:
      ConfigError: a stage cannot be loaded, or it applies to every request, so that none could have
        the drafts that the user asks for.
    """
    added = config.sampling.logits_processors if logits_processors is None else logits_processors
    stages = load_stages(added, spec.vocab_size)
    for stage in stages:
        if has_drafts and stage.is_used_by(SamplingParams()):
            raise ConfigError(
                f"--speculative cannot be combined with the stage {stage.name}, which applies to "
                "every request: such requests get no drafts"
            )
    if not added:
        return stages, []
    names = ", ".join(stage.name for stage in stages[-len(added) :])
    return stages, [Decision("logits processors", names, "as asked")]


def _cut_decision(params: Any, placement: Placement) -> Decision:
    """Returns the decision about several devices."""
    whole = sum(array.nbytes for array in jax.tree.leaves(params))
    each = bytes_on_each_device(params)
    return Decision(
        "tensor parallel",
        f"{placement.num_devices} devices",
        f"as asked; each holds {each / MIB:.1f} of {whole / MIB:.1f} MiB of weights",
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    if config.model.tokenizer is not None:
        return open_tokenizer(config.model.tokenizer)
    return checkpoint.tokenizer()


def _load(
    cache: str,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    chosen: Choices,
    *,
    phase: Phase,
) -> tuple[Any, Any, list[Decision]]:
    """Returns the graph of the model, its weights, and decisions about them."""
    layout, sharding = chosen.layout, chosen.placement.sharding

    def on_bytes(done: int, total: int) -> None:
        phase.update(done, total, f"{done / phase.seconds / 1e9:.2f} GB/s")

    def convert() -> tuple[Any, Any]:
        return load_params(checkpoint, spec, layout, sharding=sharding, on_progress=on_bytes)

    if not cache:
        return *convert(), []
    from jaxserve.checkpoint.orbax_cache import WeightsCache, entry_name  # slow to import

    weights_cache = WeightsCache(expand_home(cache))
    # An entry holds whole arrays, for any number of devices.
    name = entry_name(checkpoint, dataclasses.asdict(dataclasses.replace(layout, cut=())))
    graphdef, like = abstract_params(spec, layout, sharding=sharding)
    params = weights_cache.restore(name, like)
    if params is not None:
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        on_bytes(total, total)
        restored = Decision("weights", "restored", f"kept in {cache} by an earlier start")
        return graphdef, params, [restored]
    graphdef, params = convert()
    weights_cache.save(name, params)
    return graphdef, params, [Decision("weights", "converted", f"not in {cache} yet")]


def _allocate(
    config: EngineConfig, spec: ModelSpec, chosen: Choices, phase: Phase
) -> tuple[Sizes, kv_cache.KVCache]:
    """Resolves the sizes and allocates the KV cache. The weights must be in place.

    All bytes are those of one device.

    Raises:
      ConfigError: a size does not fit the device, or the attention backend cannot use the cache.
    """
    # Reads the device again: the cache gets the memory that the weights have left.
    device = _device(config, chosen)
    sizes = _sizes(config, spec, chosen, device)
    total = _cache_bytes(spec, chosen, sizes)
    cache = kv_cache.abstract(
        **_cache_shape(spec, chosen),
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        placement=chosen.placement,
    )
    chosen.backend.check_cache(parts_on_each_device(cache))
    phase.update(0, total, f"{total / GIB:.2f} GiB in {chosen.cache_dtype}")
    kv = kv_cache.allocate(cache)
    phase.update(total, total, f"{total / GIB:.2f} GiB in {chosen.cache_dtype}")
    return sizes, kv


def _check_memory(config: EngineConfig, spec: ModelSpec, chosen: Choices) -> None:
    """Refuses weights and sizes that do not fit, before the weights are loaded."""
    _, params = abstract_params(spec, chosen.layout, sharding=chosen.placement.sharding)
    device = after_weights(_device(config, chosen), bytes_on_each_device(params))
    sizes = _sizes(config, spec, chosen, device)
    check_room_for_steps(device, _cache_bytes(spec, chosen, sizes))


def _device(config: EngineConfig, chosen: Choices) -> Device:
    """Returns the facts about each device, with the memory that weights and cache may take now."""
    # JAX reserved `pool_fraction` of the GPU's memory as its pool. Weights and cache may take
    # `memory_fraction` of the GPU's memory, which is this part of the pool.
    pool_part = config.cache.memory_fraction / config.cache.pool_fraction
    return current_device(count=chosen.placement.num_devices, pool_part=pool_part)


def _sizes(config: EngineConfig, spec: ModelSpec, chosen: Choices, device: Device) -> Sizes:
    """See `resolve_sizes`."""
    return resolve_sizes(
        config,
        device,
        context_length=spec.context_length,
        bytes_per_token=_bytes_per_token(spec, chosen),
        windows=spec.cache_layout.windows,
    )


def _bytes_per_token(spec: ModelSpec, chosen: Choices) -> int:
    """Returns the bytes of one token in one group of layers of the cache, on each device."""
    return kv_cache.bytes_per_token(**_cache_shape(spec, chosen)) // chosen.placement.num_devices


def _cache_bytes(spec: ModelSpec, chosen: Choices, sizes: Sizes) -> int:
    """Returns the bytes of the cache on each device."""
    return _bytes_per_token(spec, chosen) * sizes.block_size * sizes.num_blocks


def _cache_shape(spec: ModelSpec, chosen: Choices) -> dict[str, Any]:
    """Returns the arguments that the functions of `kv_cache` have in common."""
    return {
        "num_layers": spec.cache_layout.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "dtype": chosen.cache_dtype,
    }
