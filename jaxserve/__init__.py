"""Serves large language models on JAX.

Exports only names that need no JAX, because the front process must not import it. For the engine
inside a Python program: ``from jaxserve.llm import LLM``.
"""

from jaxserve.config import EngineConfig as EngineConfig
from jaxserve.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
