"""Text and tokens: the tokenizer, the incremental detokenizer and the chat template.

Knows neither requests nor engines. Never imports jax. Imports transformers only to convert a
tokenizer that has no tokenizer.json.
"""
