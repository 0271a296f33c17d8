"""Maps architectures to the classes that implement them, and reads config.json with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxserve.models.hf_config import architecture_of
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.models.causal_lm import CausalLM

ENTRY_POINTS = "jaxserve.models"
"""The entry-point group of installed packages with families: ``Architecture = "module:Class"``."""


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family is implemented.

    Attributes:
      location: the class, as ``module:Class``; imported when a model needs it.
      gguf: the name of the architecture in GGUF files, or empty.
    """

    location: str
    gguf: str = ""


MODELS: dict[str, Family] = {
    "LlamaForCausalLM": Family("jaxserve.models.llama:LlamaForCausalLM", gguf="llama"),
    "MistralForCausalLM": Family("jaxserve.models.mistral:MistralForCausalLM"),
    "Qwen2ForCausalLM": Family("jaxserve.models.qwen2:Qwen2ForCausalLM", gguf="qwen2"),
    "Qwen3ForCausalLM": Family("jaxserve.models.qwen3:Qwen3ForCausalLM", gguf="qwen3"),
    "Gemma2ForCausalLM": Family("jaxserve.models.gemma2:Gemma2ForCausalLM", gguf="gemma2"),
    "Gemma3ForCausalLM": Family("jaxserve.models.gemma3:Gemma3ForCausalLM", gguf="gemma3"),
    "Gemma3ForConditionalGeneration": Family(
        "jaxserve.models.gemma3:Gemma3ForConditionalGeneration"
    ),
}
"""Architecture as in config.json -> its family."""


def register(architecture: str, location: str, *, gguf: str = "") -> None:
    """Adds a family, or replaces one, in this process.

    The engine processes of a server are other processes. For them, a package declares its families
    as entry points of the group `ENTRY_POINTS`.

    Args:
      architecture: its name in config.json.
      location: a subclass of `CausalLM`, as ``module:Class``.
      gguf: the name of the architecture in GGUF files, or empty.
    """
    MODELS[architecture] = Family(location, gguf)


def model_class(architecture: str) -> type[CausalLM]:
    """Returns the class of an architecture.

    Raises:
      UnsupportedModelError: no family implements the architecture.
      ConfigError: its family cannot be imported.
    """
    family = _location(architecture)
    try:
        return family.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the class of {architecture} must be at {family.value} (module:Class), but it cannot "
            f"be imported: {error}"
        ) from error


def _location(architecture: str) -> EntryPoint:
    if architecture in MODELS:
        return EntryPoint(architecture, MODELS[architecture].location, ENTRY_POINTS)
    installed = entry_points(group=ENTRY_POINTS)
    for entry in installed.select(name=architecture):
        return entry
    known = ", ".join([*MODELS, *sorted(installed.names)])
    raise UnsupportedModelError(
        f"architecture {architecture} is not supported; supported are {known}"
    )


def gguf_names(name: str) -> GGUFNames:
    """Returns the facts about the family of a GGUF architecture, such as "llama".

    Raises:
      UnsupportedModelError: no family has GGUF files of this architecture.
    """
    families = {family.gguf: architecture for architecture, family in MODELS.items()}
    if name not in families or not name:
        known = ", ".join(sorted(filter(None, families)))
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported; expected one of {known}"
        )
    return model_class(families[name]).GGUF


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Reads a config.json as any version of transformers writes it.

    Raises:
      UnsupportedModelError: the architecture or a variant of it is not implemented.
      CheckpointError: a key is missing, or sizes do not fit together.
      ConfigError: the family cannot be imported.
    """
    family = model_class(architecture_of(config))
    try:
        return family.read_spec(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value can have any type, so reading it can fail in many ways.
        raise CheckpointError(
            f"config.json cannot be understood ({type(error).__name__}: {error!s:.200})"
        ) from error
