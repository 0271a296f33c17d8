"""Resolves the dtype and the sizes that a config leaves open, and gives the user a reason for each.

`resolve_dtype` runs before the weights are loaded. `resolve_sizes` runs afterwards, when the memory
left for the KV cache is known. It also runs before, as if all memory were free, to refuse what the
user asked for as early as possible.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import MIB, CacheConfig, EngineConfig, ModelConfig
from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.plan import Sizes
from jaxserve.device import Device
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Decision

AS_ASKED = "as asked"
"""The reason for a value that the user asked for."""

CPU_CACHE_BYTES = 768 * MIB
"""Bytes of KV cache on a CPU, whose memory other programs share. If one full-length request needs
more, the cache is larger.
"""

CPU_STEP_BYTES = 512 * MIB
"""Bytes that the cache leaves on a CPU: compiling and running the steps of a model of 135 million
parameters takes about 370 MiB.
"""


def resolve_dtype(config: ModelConfig, device: Device) -> tuple[str, Decision | None]:
    """Returns the dtype of weights and activations, a numpy name, and the decision with its reason.

    The decision is None if the user asked for the dtype.
    """
    if config.dtype != "auto":
        return config.dtype, None
    if device.platform == "gpu" and device.has_native_bf16:
        return "bfloat16", Decision("dtype", "bfloat16", f"{device.kind} computes in it natively")
    if device.platform == "gpu":
        return "float16", Decision("dtype", "float16", f"{device.kind} has no bfloat16")
    if device.has_native_bf16:
        return "bfloat16", Decision("dtype", "bfloat16", "this CPU has bfloat16 instructions")
    return "float32", Decision("dtype", "float32", "this CPU has no bfloat16 instructions")


def resolve_sizes(
    config: EngineConfig,
    device: Device,
    *,
    context_length: int,
    bytes_per_token: int,
    windows: tuple[int | None, ...] = (None,),
) -> Sizes:
    """Resolves every size that the config leaves open.

    Args:
      config: what the user asked for.
      device: ``free_bytes`` must be read after the weights are in place.
      context_length: the longest context that the model was trained for, in tokens.
      bytes_per_token: bytes of the KV cache for one token in one group of layers, on each device.
      windows: the window of each group of layers; see `CacheGroups`.

    Raises:
      ConfigError: what the user asked for does not fit. The message names the largest value that
        would fit.
    """
    asked_len, block_size = config.model.max_model_len, config.cache.block_size
    wanted_len = _wanted_len(asked_len, context_length)
    max_num_seqs, max_num_batched_tokens = _step_sizes(config, device)
    max_drafts = config.speculation.max_drafts
    groups = CacheGroups(windows, block_size, max_num_batched_tokens, max_drafts)
    block_bytes = bytes_per_token * block_size
    num_blocks, why = _num_blocks(
        config,
        device,
        block_bytes=block_bytes,
        full_length_blocks=groups.most_blocks(wanted_len),
        max_num_seqs=max_num_seqs,
    )
    max_model_len = groups.longest(num_blocks - 1, wanted_len)
    if max_model_len < 1:
        raise _no_memory(groups, device, block_bytes=block_bytes, num_blocks=num_blocks, why=why)
    if asked_len is not None and asked_len > max_model_len:
        raise ConfigError(
            f"--max-model-len {asked_len} does not fit the KV cache of {num_blocks} blocks "
            f"({why}); the largest that fits is {max_model_len}"
        )
    on_each = " on each device" if config.parallel.tensor_parallel_size > 1 else ""
    memory = f"{num_blocks * block_bytes / MIB:.0f} MiB{on_each}, {why}"
    decisions = (
        _context_decision(asked_len, max_model_len, context_length),
        _cache_decision(groups, num_blocks, max_model_len, memory),
    )
    return Sizes(
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_drafts=max_drafts,
        decisions=decisions,
        windows=windows,
    )


def _wanted_len(asked_len: int | None, context_length: int) -> int:
    """Returns the longest request that the KV cache should hold, in tokens."""
    if asked_len is not None and asked_len > context_length:
        raise ConfigError(
            f"--max-model-len {asked_len} is more than the model's context of {context_length} "
            f"tokens; use at most {context_length}"
        )
    return asked_len or context_length


def _step_sizes(config: EngineConfig, device: Device) -> tuple[int, int]:
    """Returns ``max_num_seqs`` and ``max_num_batched_tokens``."""
    on_cpu = device.platform == "cpu"
    max_num_seqs = config.scheduler.max_num_seqs or (64 if on_cpu else 256)
    max_tokens = config.scheduler.max_num_batched_tokens or (512 if on_cpu else 8192)
    if max_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {max_tokens} must be at least --max-num-seqs "
            f"({max_num_seqs}), so that every running request gets its token"
        )
    return max_num_seqs, max_tokens


def _num_blocks(
    config: EngineConfig,
    device: Device,
    *,
    block_bytes: int,
    full_length_blocks: int,
    max_num_seqs: int,
) -> tuple[int, str]:
    """Returns the number of blocks, block 0 included, and why.

    It is no larger than requests can use. ``full_length_blocks`` are those of one request of the
    full context length.

    Raises:
      ConfigError: the user asked for more memory than there is.
    """
    cache, most = config.cache, device.most_bytes
    if most is None:
        most = device.free_bytes
    free = f"but {most / MIB:.0f} MiB are free ({device.limited_by})"
    if cache.num_blocks is not None:
        if cache.num_blocks * block_bytes > most:
            raise ConfigError(
                f"--num-blocks {cache.num_blocks} needs a KV cache of "
                f"{cache.num_blocks * block_bytes / MIB:.0f} MiB, {free}; use at most "
                f"{most // block_bytes}"
            )
        return cache.num_blocks, AS_ASKED
    if cache.kv_cache_memory_mib is not None and cache.kv_cache_memory_mib * MIB > most:
        raise ConfigError(
            f"--kv-cache-memory-mib {cache.kv_cache_memory_mib} does not fit, {free}; use at most "
            f"{most // MIB}"
        )
    replicas = config.parallel.data_parallel_size if device.platform == "cpu" else 1
    share = replace(device, free_bytes=device.free_bytes // replicas)
    budget, why = _cache_budget(cache, share, full_length_blocks * block_bytes)
    return min(budget // block_bytes, max_num_seqs * full_length_blocks) + 1, why


def _cache_budget(cache: CacheConfig, device: Device, full_length_bytes: int) -> tuple[int, str]:
    """Returns the bytes for the KV cache, and why.

    ``full_length_bytes`` is the cache of one request of the full context length.
    """
    if cache.kv_cache_memory_mib is not None:
        return cache.kv_cache_memory_mib * MIB, AS_ASKED
    if device.platform == "gpu":
        return device.free_bytes, f"{cache.memory_fraction:.0%} of {device.kind} minus the weights"
    half = device.free_bytes // 2
    limit = max(min(half, device.free_bytes - CPU_STEP_BYTES), half // 4)
    if max(CPU_CACHE_BYTES, full_length_bytes) > limit:
        why = "half of the free memory" if limit == half else "the rest is for running steps"
        return limit, why
    if full_length_bytes > CPU_CACHE_BYTES:
        return full_length_bytes, "enough for one request of the full context"
    return CPU_CACHE_BYTES, "the default on a CPU"


def _no_memory(
    groups: CacheGroups, device: Device, *, block_bytes: int, num_blocks: int, why: str
) -> ConfigError:
    """Returns the error for a cache that holds no request of one token. ``why``: its size."""
    free = ""
    if why != AS_ASKED:
        free = (
            f"; {device.free_bytes / MIB:.0f} MiB are free ({device.limited_by}). Set "
            "--kv-cache-memory-mib, use --kv-cache-dtype int8, or give the process more memory"
        )
    return ConfigError(
        f"there is no memory for a KV cache: a request needs {groups.most_blocks(1)} blocks "
        f"of {block_bytes / MIB:.1f} MiB, and the cache has {num_blocks - 1} ({why}){free}"
    )


def _context_decision(asked_len: int | None, max_model_len: int, context_length: int) -> Decision:
    if asked_len is not None:
        why = AS_ASKED
    elif max_model_len == context_length:
        why = "the model's own"
    else:
        why = f"reduced from the model's {context_length} to fit the KV cache"
    return Decision("context", f"{max_model_len} tokens", why)


def _cache_decision(
    groups: CacheGroups, num_blocks: int, max_model_len: int, memory: str
) -> Decision:
    """Returns how many tokens and requests fit the cache. ``memory``: its bytes, and why."""
    used, each = num_blocks - 1, groups.most_blocks(max_model_len)
    positions = -(-max_model_len // groups.block_size) * groups.block_size
    num_groups = len(groups.windows)
    return Decision(
        "KV cache",
        f"{num_blocks} blocks = {used * positions // each} tokens = {used // each} full-length "
        "requests",
        memory + (f"; {num_groups} groups of layers" if num_groups > 1 else ""),
    )
