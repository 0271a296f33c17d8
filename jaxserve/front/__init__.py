"""Text in, text out: admits requests, runs them on an engine and streams their completions.

Knows the engine through `client.protocol`, the tokenizer and the parsers. Knows no API: HTTP and
the bodies of OpenAI are in `openai` and in the package `server`. Never imports jax.
"""
