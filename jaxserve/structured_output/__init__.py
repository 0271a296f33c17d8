"""Holds a completion to a grammar: checks it in the front, follows it token by token in the engine.

Knows grammars, structural tags, the tokens of a model and llguidance. Knows no API:
`openai.structured_output` reads the fields of a request. Knows no format of tool calls: each format
in `parsing` writes its own rules. Never imports jax.
"""
