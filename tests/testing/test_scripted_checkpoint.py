"""Scripted checkpoints: tokens in the order of the script, and scripts that are rejected."""

import pytest

from jaxserve.testing.scripted_checkpoint import (
    EOS,
    EOS_ID,
    FIRST_SPECIAL_ID,
    SPM_EOS,
    write_scripted,
)
from jaxserve.testing.tiny_tokenizer import full_backend
from jaxserve.text.tokenizer import Tokenizer


def successor(folder, token_id: int) -> int:
    """Returns the token that a model with these weights generates after a token."""
    from safetensors.numpy import load_file

    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    (best,) = head[:, token_id].nonzero()[0]
    return int(best)


def follow(folder, prompt: str, count: int) -> list[bytes]:
    tokenizer = Tokenizer.from_folder(folder)
    token_id = tokenizer.encode(prompt)[-1]
    pieces = []
    for _ in range(count):
        token_id = successor(folder, token_id)
        pieces.append(tokenizer.token_bytes(token_id))
    return pieces


def test_generates_bytes_and_strings_in_order(tmp_path) -> None:
    scripts = {"one": ["a", b"\xf0", b"\x9f\x94", "<|end|>", " b ", EOS], "two": ["c", "d"]}
    folder = write_scripted(tmp_path / "script", scripts, special=("<|end|>",))
    assert follow(folder, "any <one>", 7) == [
        *(b"a", b"\xf0", b"\x9f\x94", b"<|end|>", b" b ", EOS.encode(), EOS.encode())
    ]
    assert follow(folder, "<two>", 4) == [b"c", b"d", b"d", b"d"]
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id == EOS_ID
    assert tokenizer.encode("<|end|>") == [FIRST_SPECIAL_ID]
    assert {EOS_ID, FIRST_SPECIAL_ID} <= tokenizer.special_ids


def test_generates_the_tokens_of_a_sentencepiece_vocabulary(tmp_path) -> None:
    scripts = {"one": ["Hello", " world", b"\xe4", b"\xb8", b"\xad", SPM_EOS]}
    folder = write_scripted(tmp_path / "script", scripts, spm=True)
    expected = [b"Hello", b" world", b"\xe4", b"\xb8", b"\xad", SPM_EOS.encode()]
    assert follow(folder, "<one>", 6) == expected
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("Hi \u4e2d")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids) == "Hi \u4e2d"


def test_rejects_a_token_with_two_successors(tmp_path) -> None:
    with pytest.raises(AssertionError, match="has the successors"):
        write_scripted(tmp_path / "script", {"one": ["a", "b"], "two": ["a", "c"]})


def test_every_id_of_the_full_tokenizer_is_a_token() -> None:
    tokenizer = Tokenizer(full_backend(512), special_tokens={})
    assert tokenizer.vocab_size == 512
    assert all(tokenizer.token_bytes(i) for i in range(512))
