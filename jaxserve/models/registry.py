"""Maps architectures to the classes that implement them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from jaxserve.models.causal_lm import CausalLM

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "jaxserve.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "jaxserve.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "jaxserve.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "jaxserve.models.qwen3:Qwen3ForCausalLM",
}
"""Architecture as in config.json -> "module:class". `model_class` imports the module."""


def model_class(architecture: str) -> type[CausalLM]:
    """Returns the class of an architecture.

    Raises:
      UnsupportedModelError: the architecture is not in `MODELS`.
    """
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported are {', '.join(MODELS)}"
        )
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(module), name)
