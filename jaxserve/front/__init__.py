"""Text in, text out: admits requests, runs them on an engine and streams their completions.

Uses the tokenizer, the parsers and, through `client.protocol`, the engine. Knows no API: the bodies
of OpenAI are in `openai`, HTTP is in the package `server`. Never imports jax.
"""
