"""The program ``python -m jaxserve.offline`` and its files, and the outputs of `jaxserve.llm.LLM`.

Answers requests through the same adapters as the server, so that the replies are equal. Knows no
HTTP. The front never imports jax; the engine runs in processes of its own.
"""
