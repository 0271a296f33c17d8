"""Tokenizers of checkpoints: bytes of tokens, special tokens, files and chat templates."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.testing.tiny_tokenizer import SPECIAL_TOKENS, tiny_backend, tiny_tokenizer
from jaxserve.text.template_files import ChatTemplates
from jaxserve.text.tokenizer import Tokenizer

BOS, EOS = SPECIAL_TOKENS.values()


def random_text(rng: random.Random) -> str:
    alphabet = [
        "a",
        "hello world",
        " the",
        "\n",
        "\t",
        "  ",
        "é",
        "漢字",
        "🔥",
        "\x00",
        "Ġ",
        "▁",
        "'",
    ]
    return "".join(rng.choices([*alphabet, chr(rng.randrange(0x20, 0xD800))], k=rng.randrange(12)))


def write(folder: Path, backend: Backend | None = None, **config: Any) -> Path:
    (backend or tiny_backend()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece_backend(*, strips: bool = True) -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "H", "e", "l", "o", "▁H", "ll", "▁He", "llo", "▁Hello"]
    merges = [("▁", "H"), ("l", "l"), ("▁H", "e"), ("ll", "o"), ("▁He", "llo")]
    backend = Backend(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strips else []), normalizers.Replace(" ", "▁")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def test_the_bytes_of_tokens_form_the_text() -> None:
    rng = random.Random(0)
    tokenizer = tiny_tokenizer()
    for _ in range(500):
        text = random_text(rng)
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.decode(ids) == text


def test_every_byte_is_a_token() -> None:
    tokenizer = tiny_tokenizer()
    single_bytes = [tokenizer.token_bytes(i) for i in range(256)]
    assert sorted(single_bytes) == [bytes([i]) for i in range(256)]
    assert tokenizer.token_text(single_bytes.index(b"\xff")) == "\ufffd"
    assert tokenizer.token_text(single_bytes.index(b"a")) == "a"


def test_cached_texts_are_strings_only_for_whole_characters() -> None:
    tokenizer = tiny_tokenizer()
    pieces = tokenizer.token_texts(skip_special_tokens=True)
    for i in range(tokenizer.vocab_size):
        data = b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i)
        piece = pieces[i]
        assert (piece.encode() if isinstance(piece, str) else piece) == data
        assert isinstance(piece, bytes) == (data[:1] >= b"\x80")


def test_unknown_ids_are_empty_and_not_cached() -> None:
    tokenizer = tiny_tokenizer()
    pieces = tokenizer.token_texts(skip_special_tokens=False)
    for i in (-1, tokenizer.vocab_size, 2**32, 2**70):
        assert tokenizer.token_bytes(i) == b""
        assert pieces[i] == ""
        assert i not in pieces
    assert tokenizer.decode([-1, 2**40]) == ""


def test_special_tokens_in_a_text_are_encoded_and_skipped_when_decoded() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(f"a{BOS}b<think>c{EOS}")
    assert tokenizer.bos_token_id in ids
    assert tokenizer.eos_token_id == ids[-1]
    assert tokenizer.special_ids == {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert tokenizer.decode(ids) == "ab<think>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{BOS}b<think>c{EOS}"


def test_added_tokens_are_plain_text_in_a_byte_level_vocabulary() -> None:
    backend = tiny_backend()
    backend.add_tokens([AddedToken("<é>", normalized=False)])
    tokenizer = Tokenizer(backend, special_tokens={})
    assert tokenizer.decode(tokenizer.encode("a<é>b")) == "a<é>b"


@pytest.mark.parametrize("seed", range(3))
def test_decodes_like_the_backend(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer, backend = tiny_tokenizer(), tiny_backend()
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(300)]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(
            ids, skip_special_tokens=skip
        )


def test_sentencepiece_tokens_have_their_bytes_and_spaces() -> None:
    tokenizer = Tokenizer(sentencepiece_backend(), special_tokens={"bos_token": "<s>"})
    ids = tokenizer.encode("Hello Hello€", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [
        *(b" Hello", b" Hello", b"\xe2", b"\x82", b"\xac")
    ]
    # Decoding removes the one space that encoding put before the text.
    assert tokenizer.decode(ids) == "Hello Hello€"
    assert tokenizer.decode(tokenizer.encode("  Hello")) == "  Hello"
    # In a stream the space separates prompt and completion.
    assert tokenizer.token_texts(skip_special_tokens=True)[ids[0]] == " Hello"


def test_sentencepiece_may_add_no_first_space() -> None:
    tokenizer = Tokenizer(sentencepiece_backend(strips=False), special_tokens={})
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


def test_an_incomplete_character_does_not_affect_its_neighbours() -> None:
    # The backend replaces every byte of a run that has an invalid one.
    tokenizer = Tokenizer(sentencepiece_backend(), special_tokens={})
    ids = tokenizer.encode("H€", add_special_tokens=False)
    assert tokenizer.decode([*ids, ids[-1]]) == "H€\ufffd"


@pytest.mark.parametrize(
    ("decoder", "complaint"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "Replace"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
    ],
)
def test_rejects_unknown_decoders(decoder: Any, complaint: str) -> None:
    backend = tiny_backend()
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer(backend, special_tokens={})


def template(backend: Backend, form: str) -> Backend:
    ids = [(t, backend.token_to_id(t)) for t in (BOS, EOS)]
    backend.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    return backend


@pytest.mark.parametrize(
    ("form", "add_bos", "num_first"),
    [
        ("$A", None, 0),
        (f"{BOS} $A", None, 1),
        (f"{BOS} $A {EOS}", None, 1),  # no completion follows an end token
        (f"$A {EOS}", None, 0),
        (f"{BOS} $A", False, 0),
        ("$A", True, 1),
    ],
)
def test_a_text_begins_with_the_bos_token_if_configured(
    form: str, add_bos: bool | None, num_first: int
) -> None:
    tokenizer = Tokenizer(
        template(tiny_backend(), form), special_tokens=SPECIAL_TOKENS, add_bos=add_bos
    )
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id] * num_first + plain
    assert tokenizer.encode("") == [tokenizer.bos_token_id] * num_first
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_reads_a_folder_with_settings(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        bos_token={"content": BOS, "lstrip": False, "special": True},
        eos_token=EOS,
        pad_token=None,
        add_bos_token=True,
        chat_template="plain",
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert tokenizer.encode("") == [tokenizer.bos_token_id]
    assert tokenizer.chat_template == "plain"


def test_reads_a_folder_with_only_a_tokenizer(tmp_path: Path) -> None:
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_reads_special_tokens_from_the_older_file(tmp_path: Path) -> None:
    write(tmp_path, eos_token="<think>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": "<think>"}
    assert tokenizer.eos_token_id in tokenizer.special_ids


def test_named_tokens_outside_the_vocabulary_get_no_id(tmp_path: Path) -> None:
    size = tiny_tokenizer().vocab_size
    tokenizer = Tokenizer.from_folder(write(tmp_path, pad_token="[PAD]"))
    assert tokenizer.vocab_size == size
    assert max(tokenizer.encode("[PAD]")) < size


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "one"}, {"chat_template.jinja": "file"}, "file"),
        ({}, {"chat_template.json": '{"chat_template": "older file"}'}, "older file"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "usual"},
                ]
            },
            {},
            "usual",
        ),
        ({"chat_template": [{"name": "rag", "template": "rag"}]}, {}, None),
    ],
)
def test_reads_the_chat_template_of_a_folder(
    tmp_path: Path, config: dict, files: dict, expected: str | None
) -> None:
    write(tmp_path, **config)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert Tokenizer.from_folder(tmp_path).chat_template == expected


NAMED = [
    {"name": "tool_use", "template": "tools"},
    {"name": "default", "template": "usual"},
    {"name": "rag", "template": "rag"},
]


@pytest.mark.parametrize(
    ("template", "files", "expected"),
    [
        (NAMED, {}, ("usual", "tools")),
        (NAMED[:1], {}, ("tools", "tools")),
        ("one", {"tool_use": "file of tools"}, ("one", "file of tools")),
        (NAMED, {"tool_use": "file of tools"}, ("usual", "file of tools")),
        (NAMED, {"default": "file"}, ("file", None)),
        (NAMED, {"default": "file", "tool_use": "file of tools"}, ("file", "file of tools")),
        (None, {"rag": "rag"}, (None, None)),
    ],
)
def test_reads_the_template_for_tools(
    tmp_path: Path, template: object, files: dict[str, str], expected: tuple
) -> None:
    write(tmp_path, chat_template=template)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        path = f"additional_chat_templates/{name}.jinja"
        (tmp_path / ("chat_template.jinja" if name == "default" else path)).write_text(content)
    templates = Tokenizer.from_folder(tmp_path).chat_templates
    assert templates == ChatTemplates(*expected)
    assert templates.template_for(with_tools=False) == expected[0]
    assert templates.template_for(with_tools=True) == (expected[1] or expected[0])


def test_a_template_for_tools_that_is_not_a_string_is_refused(tmp_path: Path) -> None:
    write(tmp_path, chat_template=[{"name": "tool_use", "template": 5}])
    with pytest.raises(CheckpointError, match="must be a string, got 5"):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_of_the_file_are_disabled(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert len(tokenizer.encode("a b c d e f")) > 8
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not a JSON object"),
    ],
)
def test_rejects_damaged_folders(
    tmp_path: Path, name: str, content: str | None, complaint: str
) -> None:
    write(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer.from_folder(tmp_path)


def test_older_files_are_converted(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "hello", "bos_token": "hello"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "hello the world 漢字"
    assert tokenizer.encode(" the world")[0] == tiny_backend().token_to_id("Ġthe")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_rejects_lone_surrogates() -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogates"):
        tiny_tokenizer().encode("abc\ud83d")


def test_threads_get_their_own_results() -> None:
    rng = random.Random(1)
    tokenizer = tiny_tokenizer()
    inputs = [random_text(rng) * 20 for _ in range(200)]
    expected = [tokenizer.encode(text) for text in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, inputs)) == expected


def test_encodes_long_texts_without_spaces() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("hello" * 40_000, " " * 200_000, "漢" * 100_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
