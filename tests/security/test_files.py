"""Untrusted model files either load correctly or are rejected with a one-line error.

CVE-2026-7482, CVE-2024-37032, CVE-2025-53630: readers that trusted what a file says about itself.
"""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.folder import FolderCheckpoint
from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.checkpoint.safetensors import SafetensorsFile
from jaxserve.models.layout import Layout
from jaxserve.models.loading import load_params
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.text.tokenizer import Tokenizer

# --- safetensors ---

VALUES = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(6, dtype=np.int8)}
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    "b": {"dtype": "I8", "shape": [6], "data_offsets": [48, 54]},
}
DATA = VALUES["a"].tobytes() + VALUES["b"].tobytes()


def packed(header, data=DATA):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def read_all(path):
    file = SafetensorsFile(path)
    return {name: np.array(array) for name, array in file.read(list(file.entries))}


def changed(name, **changes):
    return {**HEADER, name: {**HEADER[name], **changes}}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (packed(changed("b", data_offsets=[47, 53])), "overlap"),
        (packed(changed("b", shape=[54], data_offsets=[0, 54])), "overlap"),
        (packed(changed("b", shape=[1], data_offsets=[20, 21])), "overlap"),
        (packed(changed("b", dtype="BOOL", shape=[True] * 6)), "damaged header"),
        (packed(changed("b", dtype=["I8"])), "damaged header"),
        (packed(changed("b", dtype={})), "damaged header"),
        (packed(changed("b", shape={"6": 6})), "damaged header"),
        (packed(changed("b", shape=[1] * 1000)), "damaged header"),
        (packed(changed("b", shape=[2**62] * 100_000)), "damaged header"),
        (packed(changed("b", shape=[2**63, 2**63, 0], data_offsets=[48, 48])), "damaged header"),
        (packed(changed("b", shape="6")), "damaged header"),
        (packed(changed("b", data_offsets=[48, 54, 60])), "damaged header"),
        (packed(b'{"a":' * 200_000), "damaged header"),
        (packed(b"[" * 200_000), "damaged header"),
        (packed(b'{"a":' + b"9" * 10_000 + b"}"), "damaged header"),
        (
            packed(
                json.dumps(HEADER)[:-1].encode()
                + b',"a":'
                + json.dumps(HEADER["b"]).encode()
                + b"}"
            ),
            "twice",
        ),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}" * 50, "not a safetensors file"),
        (packed({"x" * 10_000: 5, **HEADER}), "damaged header"),
        (packed(changed("b", shape=["x" * 100_000])), "damaged header"),
        (packed(changed("b", dtype="x" * 100_000)), "not supported"),
    ],
)
def test_rejects_inconsistent_safetensors_headers(scratch, raw, words, rejection) -> None:
    path = scratch / "lie.safetensors"
    path.write_bytes(raw)
    message = rejection(lambda: read_all(path))
    assert message is not None
    assert words in message


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 60)
    | st.floats()
    | st.sampled_from(["", "F32", "I8", "BOOL", "F8_E4M3", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = st.sampled_from([("a",), ("b",), ("c",), ("__metadata__",)]) | st.tuples(
    st.sampled_from("ab"), st.sampled_from(["dtype", "shape", "data_offsets", "more"])
)


@given(changes=st.lists(st.tuples(KEYS, ODD), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_safetensors_with_odd_headers_load_correctly_or_are_rejected(
    scratch, changes, rejection
) -> None:
    header = json.loads(json.dumps(HEADER))
    for (*parents, key), value in changes:
        place = header
        for parent in parents:
            place = place[parent] if isinstance(place.get(parent), dict) else place
        place[key] = value
    check_safetensors(scratch, packed(header), rejection)


@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_safetensors_with_changed_bytes_load_correctly_or_are_rejected(
    scratch, seed, num_bytes, rejection
) -> None:
    rng, raw = random.Random(seed), bytearray(packed(HEADER))
    for _ in range(num_bytes):
        raw[rng.randrange(len(raw) - len(DATA))] = rng.choice(b'0123456789"{}[],:\x00\xff F')
    check_safetensors(scratch, bytes(raw), rejection)


def check_safetensors(scratch, raw, rejection):
    """Checks that loaded arrays match their header byte by byte and do not overlap."""
    path = scratch / "odd.safetensors"
    path.write_bytes(raw)
    arrays = {}
    if rejection(lambda: arrays.update(read_all(path))) is None:
        assert sum(array.nbytes for array in arrays.values()) <= len(DATA)
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        for name, array in arrays.items():
            begin, end = header[name]["data_offsets"]
            assert array.tobytes() == raw[8 + length :][begin:end]
            assert list(array.shape) == header[name]["shape"]


CONFIG = tiny_config()


# --- folders ---


@pytest.fixture(scope="module")
def folder(scratch):
    return write_checkpoint(scratch / "model", CONFIG)


def open_folder(path):
    """Reads everything except the weights that the front and an engine need from a folder."""
    checkpoint = open_checkpoint(str(path), names_of=gguf_names)
    checkpoint.tokenizer().encode("hello")
    return read_spec(checkpoint.config)


NOT_JSON = [
    b"",
    b"[",
    b"[]",
    b"5",
    b"\xff\xfe",
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"{" * 10,
    b"NaN",
]


@pytest.mark.parametrize("raw", NOT_JSON)
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("special_tokens_map.json", "model.safetensors.index.json"),
    ],
)
def test_rejects_files_that_are_not_json_objects(folder, tmp_path, name, raw, rejection) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_bytes(raw)
    message = rejection(lambda: open_folder(tmp_path))
    assert message is not None
    assert name in message


@pytest.mark.parametrize(
    "file",
    [
        *("../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b", "./x", "a\x00b", 5, None),
        *(["model.safetensors"], {"a": 1}, "..\\x", "x" * 10_000, "~", "model.safetensors/"),
    ],
)
def test_an_index_cannot_name_files_in_other_folders(folder, tmp_path, file, rejection) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (inner / "config.json").write_bytes((folder / "config.json").read_bytes())
    index = {"weight_map": {"model.norm.weight": file}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    assert rejection(lambda: FolderCheckpoint(inner)) is not None


JSON_VALUES = ODD | st.sampled_from(
    ["llama", [0] * 50, {"rope_type": "yarn"}, {"rope_type": "linear"}]
)


@pytest.mark.parametrize("key", [*CONFIG, "quantization_config", "rope_scaling", "sliding_window"])
@given(value=JSON_VALUES)
@settings(max_examples=8, deadline=None)
def test_configs_with_odd_values_are_read_or_rejected(key, value, rejection) -> None:
    """Any JSON value: an impossible model is rejected with a message and takes no memory."""
    config = json.loads(json.dumps({**CONFIG, key: value}, default=str))
    rejection(lambda: read_spec(config))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"]
)
def test_sizes_larger_than_the_weights_take_no_memory(scratch, key, rejection) -> None:
    """Sizes are compared with the tensors in the file before memory is allocated."""
    path = write_checkpoint(scratch / f"large-{key}", CONFIG)
    large = {**CONFIG, key: 2**40}
    (path / "config.json").write_text(json.dumps(large))

    def load():
        checkpoint = open_checkpoint(str(path), names_of=gguf_names)
        spec = read_spec(checkpoint.config)
        load_params(
            checkpoint, spec, Layout("float32", "scan"), on_progress=lambda done, total: None
        )

    assert rejection(load) is not None


TOKENIZER_CONFIGS = [
    *({"chat_template": 5}, {"chat_template": [5]}, {"chat_template": [{"name": "default"}]}),
    *({"chat_template": [{"name": []}]}, {"chat_template": {"default": "x"}}, {"bos_token": 5}),
    *({"bos_token": {"content": []}}, {"add_bos_token": "x"}, {"bos_token": ["a"]}),
]


@pytest.mark.parametrize("config", TOKENIZER_CONFIGS)
def test_odd_tokenizer_configs_are_read_or_rejected(folder, tmp_path, config, rejection) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def load():
        template = Tokenizer.from_folder(tmp_path).chat_template
        assert template is None or isinstance(template, str)

    rejection(load)


def test_rejects_a_chat_template_that_is_not_utf8(folder, tmp_path, rejection) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x80")
    message = rejection(lambda: Tokenizer.from_folder(tmp_path))
    assert message is not None
    assert "chat_template.jinja" in message


def test_tensors_are_read_as_they_were_written(scratch) -> None:
    path = write_checkpoint(scratch / "same", CONFIG)
    arrays = dict(open_checkpoint(str(path), names_of=gguf_names).tensors())
    for name, array in random_tensors(CONFIG).items():
        assert arrays[name].tobytes() == array.tobytes()
