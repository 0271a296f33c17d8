"""What the front of an engine needs of a checkpoint: everything but the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.locate import open_checkpoint, open_tokenizer
from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.text.tokenizer import Tokenizer


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
          ConfigError: its generation_config.json, or what is put over it, is impossible.
        """
        checkpoint = open_checkpoint(config.model)
        tokenizer = (
            checkpoint.tokenizer() if config.tokenizer is None else open_tokenizer(config.tokenizer)
        )
        defaults = GenerationDefaults.from_checkpoint(
            checkpoint.generation_config,
            checkpoint.config,
            use_sampling=config.generation_config == "auto",
            overrides=_overrides(config.override_generation_config),
        )
        return cls(checkpoint.name, tokenizer, defaults)


def _overrides(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--override-generation-config must be a JSON object, got {text[:200]!r}"
        ) from error
