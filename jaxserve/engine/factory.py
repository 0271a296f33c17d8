"""Builds an engine from its configuration: checkpoint, weights, sizes, KV cache, programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from jaxserve.config import GIB, MIB, EngineConfig
from jaxserve.core.plan import Sizes
from jaxserve.device import Device
from jaxserve.engine.choices import Choices, choose
from jaxserve.engine.core import BuiltEngine, assemble
from jaxserve.engine.loading import LoadedModel, OpenedFiles, load, open_files
from jaxserve.engine.memory import (
    SMALLER_CACHE,
    SMALLER_STEPS,
    after_weights,
    check_room_for_steps,
    explained,
)
from jaxserve.engine.sizing import resolve_sizes
from jaxserve.engine.startup import Phase
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Decision, Progress
from jaxserve.models.loading import abstract_params
from jaxserve.models.spec import ModelSpec
from jaxserve.runner import kv_cache, proposer
from jaxserve.runner.buckets import table_widths
from jaxserve.runner.compilation_cache import keep_compiled_programs
from jaxserve.runner.device import current_device, engine_devices
from jaxserve.runner.placement import bytes_on_each_device, parts_on_each_device
from jaxserve.runner.proposer import ProposeFn
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling.declaration import Stage
from jaxserve.sampling.registry import check_params, load_stages
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.constraint import GrammarCompiler


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
    phase = functools.partial(Phase, engine, on_progress=on_progress)
    files = open_files(config)
    chosen = choose(config, files.checkpoint, files.spec, devices)
    _check_memory(config, files.spec, chosen)
    stages, stage_decisions = _stages(
        config, logits_processors, files.spec, has_drafts=bool(propose)
    )
    model = load(config.model.weights_cache, files, chosen, phase)
    sizes, kv = _allocate(config, files.spec, chosen, phase)
    runner = _runner(config, files.spec, chosen, model, sizes, kv, stages, propose)
    if config.compile.warmup:
        with explained("running steps", SMALLER_STEPS), phase("compile", "programs") as compiling:
            runner.warm_up(compiling.update)
    decisions = [*chosen.decisions, *stage_decisions, *model.decisions, *sizes.decisions, kept]
    return _assemble(config, engine, files, runner, sizes, stages, decisions)


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


def _runner(
    config: EngineConfig,
    spec: ModelSpec,
    chosen: Choices,
    model: LoadedModel,
    sizes: Sizes,
    kv: kv_cache.KVCache,
    stages: tuple[Stage, ...],
    propose: ProposeFn | None,
) -> ModelRunner:
    return ModelRunner(
        functools.partial(nnx.merge, model.graphdef),
        model.params,
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


def _assemble(
    config: EngineConfig,
    engine: int,
    files: OpenedFiles,
    runner: ModelRunner,
    sizes: Sizes,
    stages: tuple[Stage, ...],
    decisions: list[Decision],
) -> BuiltEngine:
    grammars = GrammarCompiler(files.tokenizer, files.spec.vocab_size)
    return assemble(
        config,
        engine,
        runner,
        sizes,
        vocab_size=files.spec.vocab_size,
        hidden_size=files.spec.hidden_size,
        decisions=decisions,
        compile_grammar=grammars.start,
        parameters=tuple(parameter for stage in stages for parameter in stage.parameters),
        check_params=functools.partial(check_params, stages),
        step_costs=runner.step_costs,
        fingerprint=files.fingerprint,
    )


def _allocate(
    config: EngineConfig, spec: ModelSpec, chosen: Choices, phase: Callable[[str, str], Phase]
) -> tuple[Sizes, kv_cache.KVCache]:
    """Resolves the sizes and allocates the KV cache. The weights must be in place.

    All bytes are those of one device.

    Raises:
      ConfigError: a size does not fit the device, or the attention backend cannot use the cache.
    """
    with (
        explained("allocating the KV cache", SMALLER_CACHE),
        phase("allocate KV cache", "bytes") as allocating,
    ):
        # Reads the device again: the cache gets the memory that the weights have left.
        sizes = _sizes(config, spec, chosen, _device(config, chosen))
        total = _cache_bytes(spec, chosen, sizes)
        cache = kv_cache.abstract(
            **_cache_shape(spec, chosen),
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            placement=chosen.placement,
        )
        chosen.backend.check_cache(parts_on_each_device(cache))
        shown = f"{total / GIB:.2f} GiB in {chosen.cache_dtype}"
        allocating.update(0, total, shown)
        kv = kv_cache.allocate(cache)
        allocating.update(total, total, shown)
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
