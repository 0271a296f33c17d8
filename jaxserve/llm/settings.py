"""The settings of an `LLM`: from keywords to a config and to the environment of jax."""

from __future__ import annotations

import dataclasses
import logging
import sys
import typing
from collections.abc import Mapping, MutableMapping
from typing import Any

from jaxserve.client.launcher import memory_settings
from jaxserve.config import EngineConfig
from jaxserve.device import NVIDIA_DRIVER
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Returns the config with these settings, each in its group.

    Those of the group ``recovery`` are unknown: they are about engines in other processes.

    Raises:
      ConfigError: a setting is unknown; the message lists them all.
    """
    rest = dict(settings)
    groups = {}
    known: list[str] = []
    groups_of = typing.get_type_hints(EngineConfig)
    del groups_of["recovery"]
    for name, group in groups_of.items():
        fields = [field.name for field in dataclasses.fields(group)]
        known += fields
        groups[name] = group(**{field: rest.pop(field) for field in fields if field in rest})
    if rest:
        raise ConfigError(f"unknown setting {', '.join(rest)}; expected one of {', '.join(known)}")
    return EngineConfig(**groups)


def ask_for_memory(config: EngineConfig, environment: MutableMapping[str, str]) -> None:
    """Sets the share of a GPU's memory that jax reserves; warns if that may come too late."""
    settings = memory_settings(config.cache, environment)
    environment.update(settings)
    if settings and "jax" in sys.modules and NVIDIA_DRIVER.exists():
        wanted = ", ".join(f"{name}={value}" for name, value in settings.items())
        logger.warning(
            "jax was imported before this LLM was created. If jax has been used, it has reserved "
            "its default share of the GPU's memory, and memory_fraction has no effect. Create the "
            "LLM before using jax, or set %s in the environment",
            wanted,
        )
