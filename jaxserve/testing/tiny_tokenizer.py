"""A byte-level tokenizer of a few hundred tokens."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.tokenizer import Tokenizer

MERGES = (
    *(("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("o", "r"), ("or", "l"), ("orl", "d")),
    *(("Ġ", "w"), ("Ġw", "orld"), ("i", "n"), ("Ġ", "t"), ("Ġt", "he")),
)
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
ADDED_TOKENS = ("<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_backend() -> Backend:
    """256 bytes, a dozen merges, two special tokens and two that are added but not special."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS.values()])
    backend.add_tokens([AddedToken(t, special=False) for t in ADDED_TOKENS])
    return backend


def tiny_tokenizer() -> Tokenizer:
    """The tokenizer with a chat template. No special token is put before a text."""
    return Tokenizer(tiny_backend(), special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE)
