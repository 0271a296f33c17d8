"""Grammars of completions: checked in the front, followed token by token in the engine.

Knows grammars, structural tags, the tokens of a model and llguidance. Knows no API:
`openai.structured_output` reads the fields of a request. Knows no format of tool calls: each format
in `parsing` writes its own rules. Never imports jax.
"""
