"""`LLM`: a model in this process, for scripts and notebooks, without a server.

from jaxserve import SamplingParams
from jaxserve.llm import LLM

with LLM("path/to/model", max_model_len=2048) as llm:
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from jaxserve.llm.llm import LLM as LLM
from jaxserve.llm.outputs import CallFailedError as CallFailedError
from jaxserve.llm.outputs import CompletionOutput as CompletionOutput
from jaxserve.llm.outputs import EmbeddingOutput as EmbeddingOutput
from jaxserve.llm.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from jaxserve.llm.outputs import LLMOutput as LLMOutput
from jaxserve.llm.outputs import Logprob as Logprob
from jaxserve.llm.outputs import RequestMetrics as RequestMetrics
