"""Tokenizers of a few hundred tokens: byte-level, and sentencepiece as in Llama 2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from string import ascii_lowercase

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.text.template_files import ChatTemplates
from jaxserve.text.token_bytes import SPACE_MARK
from jaxserve.text.tokenizer import Tokenizer

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


def tiny_backend(
    merges: Sequence[tuple[str, str]] = MERGES, *, unreachable: Sequence[str] = ()
) -> Backend:
    """Returns a tokenizer of 256 bytes, merges, two special tokens and two added ordinary tokens.

    Args:
      merges: the merges, a dozen by default.
      unreachable: more tokens, in the byte-level alphabet; encoding never produces them.
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokens += [*SPECIAL_TOKENS.values(), *ADDED_TOKENS]
    tokens += [token for token in unreachable if token not in tokens]
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS.values()])
    backend.add_tokens([AddedToken(t, special=False) for t in ADDED_TOKENS])
    return backend


def full_backend(vocab_size: int = 512) -> Backend:
    """Returns a byte-level tokenizer of ``vocab_size`` tokens, filled up with pairs of letters."""
    pairs = [pair for pair in product(ascii_lowercase, repeat=2) if pair not in MERGES]
    num_added = len(SPECIAL_TOKENS) + len(ADDED_TOKENS)
    return tiny_backend([*MERGES, *pairs][: vocab_size - 256 - num_added])


SPM_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def spm_backend(pieces: Sequence[str] = ()) -> Backend:
    """Returns a tokenizer as in Llama 2: space marks, byte tokens, and <s> before every string.

    Args:
      pieces: tokens besides bytes and printable ASCII characters; encoding never produces them.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [SPACE_MARK, *map(chr, range(0x21, 0x7F))]
    tokens += [piece for piece in pieces if piece not in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    special = [AddedToken(token, special=True) for token in SPM_SPECIAL_TOKENS.values()]
    backend.add_special_tokens(special)
    return backend


def tiny_tokenizer() -> Tokenizer:
    """Returns the tiny tokenizer with a chat template; it adds no special tokens to a string."""
    templates = ChatTemplates(CHAT_TEMPLATE)
    return Tokenizer(tiny_backend(), special_tokens=SPECIAL_TOKENS, chat_templates=templates)
