"""Decides how an engine runs a model, before the weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.checkpoint import Checkpoint
from jaxserve.config import MIB, EngineConfig, ModelConfig
from jaxserve.core.policy import policy_named
from jaxserve.device import Device
from jaxserve.engine.sizing import resolve_dtype
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Decision
from jaxserve.models.layout import Layout, Loop
from jaxserve.models.loading import array_specs
from jaxserve.models.spec import ModelSpec
from jaxserve.ops import attention
from jaxserve.ops.attention import AttentionBackend
from jaxserve.ops.linear import FORMATS, ArraySpec
from jaxserve.ops.rope import DynamicScaling
from jaxserve.runner import kv_cache
from jaxserve.runner.device import current_device
from jaxserve.runner.placement import Placement, place


@dataclass(frozen=True, slots=True)
class Choices:
    """The decisions that do not depend on the weights.

    Attributes:
      layout: of the weights.
      placement: the devices.
      cache_dtype: of the KV cache, a numpy name.
      backend: of attention.
      decisions: all of these with their reasons.
    """

    layout: Layout
    placement: Placement
    cache_dtype: str
    backend: AttentionBackend
    decisions: tuple[Decision, ...]


def choose(
    config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, devices: Sequence[Any]
) -> Choices:
    """Decides how an engine runs a model on its devices.

    Args:
      config: the settings that the user asked for.
      checkpoint: the model, from which only the configuration has been read.
      spec: the shape of the model.
      devices: the devices of jax that the engine has.

    Raises:
      ConfigError: a setting is impossible for this model on these devices.
    """
    policy_named(config.scheduler.policy)  # the scheduler, made last, would refuse it too late
    device = current_device(count=len(devices))
    dtype, dtype_decision = resolve_dtype(config.model, device)
    weight_format = _weight_format(config.model.quantization)
    # In a loop, few modules declare all arrays.
    arrays = array_specs(spec, Layout(dtype, "scan", weight_format))
    placement = place(devices, arrays)
    cache_dtype, cache_reason = kv_cache.cache_dtype(config.cache.kv_cache_dtype, dtype, device)
    shape = _attention_shape(config, spec, placement, dtype, cache_dtype)
    backend, backend_reason = attention.select(config.compile.attention_backend, device, shape)
    loop, loop_reason = _layer_loop(config.compile.layer_loop, spec, device, backend)
    decisions = (
        Decision("model", checkpoint.name, f"{spec.architecture} from {checkpoint.path}"),
        Decision("device", device.kind, f"the default of jax on {device.platform}"),
        dtype_decision or Decision("dtype", dtype, "as asked"),
        Decision("KV cache dtype", cache_dtype, cache_reason),
        Decision("attention", backend.name, backend_reason),
        Decision("layers", loop, loop_reason),
        _quantization_decision(config.model, weight_format, arrays),
        *_rope_decisions(spec),
    )
    layout = Layout(dtype, loop, weight_format, placement.cut)
    return Choices(layout, placement, cache_dtype, backend, decisions)


def _weight_format(asked: str | None) -> str:
    """Returns the name of the format of the weights. Raises ConfigError."""
    if asked is not None and asked not in FORMATS:
        raise ConfigError(f"--quantization must be one of {', '.join(FORMATS)}, got {asked!r:.100}")
    return asked or "dense"


def _quantization_decision(config: ModelConfig, weight_format: str, arrays: Any) -> Decision:
    """``arrays``: the result of `array_specs`."""
    specs: list[ArraySpec] = jax.tree.leaves(arrays)
    size = sum(math.prod(one.shape) * jnp.dtype(one.dtype).itemsize for one in specs) / MIB
    why = "as asked" if config.quantization else "the default"
    return Decision("quantization", weight_format, f"{why}; {size:.1f} MiB of weights")


def _rope_decisions(spec: ModelSpec) -> list[Decision]:
    """Tells of a rotation that differs from the one of transformers for long prompts."""
    scalings = [rope.scaling for rope in spec.ropes]
    lengths = [s.original_length for s in scalings if isinstance(s, DynamicScaling)]
    why = "beyond {} tokens, transformers rotates the tokens of a prompt by its whole length"
    return [Decision("rope", "by position", why.format(length)) for length in lengths]


def _attention_shape(
    config: EngineConfig, spec: ModelSpec, placement: Placement, dtype: str, cache_dtype: str
) -> attention.AttentionShape:
    """Returns the attention that each device computes."""
    return attention.AttentionShape(
        num_heads=spec.num_heads // placement.num_devices,
        num_kv_heads=spec.num_kv_heads // placement.num_devices,
        head_dim=spec.head_dim,
        block_size=config.cache.block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def _layer_loop(
    asked: Literal["auto"] | Loop,
    spec: ModelSpec,
    device: Device,
    backend: AttentionBackend,
) -> tuple[Loop, str]:
    """Returns whether to scan over the layers or to unroll them, and why.

    Raises:
      ConfigError: a loop is asked for, and the backend cannot run these layers in one.
    """
    can_scan = backend.array_windows or len(set(spec.windows)) == 1
    if asked == "scan" and not can_scan:
        raise ConfigError(
            "the layers of this model differ in their attention window, and the attention backend "
            f"{backend.name} cannot run such layers in a loop; use --layer-loop unroll"
        )
    if asked != "auto":
        return asked, "as asked"
    if device.platform != "cpu":
        return "unroll", "the whole step is one graph of kernels"
    if not can_scan:
        return "unroll", "the layers differ in their attention window"
    return "scan", "compiles many times faster than unrolled layers"
