"""What the front of an engine needs of a checkpoint: everything but the weights."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.checkpoint.locate import open_checkpoint, open_tokenizer
from jaxserve.config import ModelConfig
from jaxserve.generation_defaults import GenerationDefaults
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's short name, its tokenizer and its sampling defaults."""

    name: str
    tokenizer: Tokenizer
    defaults: GenerationDefaults

    @classmethod
    def open(cls, config: ModelConfig) -> ServedModel:
        """Reads them from where ``config.model`` and ``config.tokenizer`` point.

        Raises:
          CheckpointError: there is no such model, or it cannot be read.
          ConfigError: its generation_config.json is impossible.
        """
        checkpoint = open_checkpoint(config.model)
        tokenizer = (
            checkpoint.tokenizer() if config.tokenizer is None else open_tokenizer(config.tokenizer)
        )
        defaults = GenerationDefaults.from_checkpoint(
            checkpoint.generation_config,
            checkpoint.config,
            use_sampling=config.generation_config == "auto",
        )
        return cls(checkpoint.name, tokenizer, defaults)
