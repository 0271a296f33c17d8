"""Builds a tokenizer from GGUF metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError
from jaxserve.text.template_files import DEFAULT, TOOL_USE, ChatTemplates
from jaxserve.text.token_bytes import SPACE_MARK
from jaxserve.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The token types in ``tokenizer.ggml.token_type``."""

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule that splits text into words, within which a byte-level tokenizer merges tokens.

    Attributes:
      split: regular expression that matches one word; None for the expression of GPT-2.
      splits_digits: first makes every digit a separate word.
      ignores_merges: a word that is a token becomes that token, without merges.
      composes: first normalises text to Unicode NFC.
      adds_bos: puts the bos token before text, unless the file says otherwise.
    """

    split: str | None = None
    splits_digits: bool = False
    ignores_merges: bool = False
    composes: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Builds the pre-tokenizer, whose last stage maps bytes to characters of the vocabulary."""
        steps = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        use_regex = self.split is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
        return pre_tokenizers.Sequence(steps)


_GPT2_RULE = PreTokenizer()
_DIGITS_RULE = PreTokenizer(splits_digits=True)
_LLAMA3_RULE = PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN2_RULE = PreTokenizer(_QWEN2, composes=True)

# The rules by the value of ``tokenizer.ggml.pre``. Older files lack the key and count as "default",
# for which the rule of GPT-2 is the best guess.
PRE_TOKENIZERS = {
    "default": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "jais": _GPT2_RULE,
    "trillion": _GPT2_RULE,
    "exaone4": _GPT2_RULE,
    "granite-docling": _GPT2_RULE,
    "mellum": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "exaone": _DIGITS_RULE,
    "minerva-7b": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "falcon-h1": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "lfm2": _LLAMA3_RULE,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "megrez": PreTokenizer(_QWEN2),
    "stablelm2": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata describes, with its chat template.

    Supports the kinds ``gpt2`` (byte-level) and ``llama`` (sentencepiece).

    Raises:
      CheckpointError: the metadata has no tokenizer, another kind, or a damaged one.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise CheckpointError("GGUF metadata has no tokenizer: tokenizer.ggml.tokens is missing")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError(
            f"GGUF tokenizer is damaged: {len(tokens)} tokens, {len(vocab)} of them distinct, "
            f"{len(kinds)} token types"
        )
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, vocab)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, vocab, kinds), True
    else:
        raise CheckpointError(
            f"GGUF tokenizer model {kind!r} is not supported; expected 'gpt2' or 'llama'"
        )
    typed = list(zip(tokens, kinds, strict=True))
    special = [token for token, kind in typed if kind in (CONTROL, UNKNOWN)]
    plain = [token for token, kind in typed if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL_TOKENS.items()}
    templates = ChatTemplates.of(
        {
            DEFAULT: metadata.get("tokenizer.chat_template"),
            TOOL_USE: metadata.get(f"tokenizer.chat_template.{TOOL_USE}"),
        },
        "the file",
    )
    return Tokenizer(
        backend,
        special_tokens={
            name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)
        },
        chat_templates=templates,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
    )


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int]) -> tuple[Backend, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise CheckpointError(
            f"GGUF pre-tokenizer {name!r} is not supported; expected one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges = _split_merges(metadata.get("tokenizer.ggml.merges", []))
    backend = Backend(_bpe(vocab, merges, ignore_merges=rule.ignores_merges))
    if rule.composes:
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = rule.build()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend, rule.adds_bos


def _sentencepiece(
    metadata: dict[str, Any], vocab: dict[str, int], kinds: Sequence[int]
) -> Backend:
    if "tokenizer.ggml.merges" in metadata:
        merges = _split_merges(metadata["tokenizer.ggml.merges"])
    else:
        merges = _merges_from_scores(vocab, kinds, metadata.get("tokenizer.ggml.scores", []))
    unknown = next((token for token, i in vocab.items() if kinds[i] == UNKNOWN), None)
    backend = Backend(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # Sentencepiece puts one space before every text, even if the text begins with a space.
    add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(SPACE_MARK)] if add_space else []
    strip = [decoders.Strip(" ", 1, 0)] if add_space else []
    backend.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [*prepend, normalizers.Replace(" ", SPACE_MARK)]
    )
    backend.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _split_merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    merges = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise CheckpointError(
                f"GGUF tokenizer is damaged: {line!r} is not a merge of two tokens"
            )
        merges.append((left, right))
    return merges


def _merges_from_scores(
    vocab: dict[str, int], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Returns the merges that sentencepiece would apply, best first.

    Sentencepiece stores no merges: it joins the two adjacent tokens whose union is the token with
    the highest score. Among splits of one token, the one with the longest left part comes first.
    """
    if len(scores) != len(vocab):
        raise CheckpointError(
            f"GGUF tokenizer is damaged: {len(vocab)} tokens and {len(scores)} scores"
        )
    merges = [
        (-scores[i], -at, token[:at], token[at:])
        for token, i in vocab.items()
        if kinds[i] in (NORMAL, USER_DEFINED)
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the package raises nothing more precise
        raise CheckpointError(f"GGUF tokenizer is damaged: {error}") from error
