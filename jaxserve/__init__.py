"""jaxserve: serve large language models on JAX.

Only host-side names are exported here, so that the front process can import this package without
importing jax. The in-process engine is one import further: ``from jaxserve.llm import LLM``.
"""

from jaxserve.config import EngineConfig as EngineConfig
from jaxserve.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
