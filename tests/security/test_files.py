"""Untrusted model files either load correctly or are rejected with a one-line error.

CVE-2026-7482, CVE-2024-37032, CVE-2025-53630: readers that trusted what a file says about itself.
"""

import functools
import json
import math
import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.folder import FolderCheckpoint
from jaxserve.checkpoint.gguf import GGUFCheckpoint
from jaxserve.checkpoint.gguf_file import ARRAY, SCALARS, STRING
from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.checkpoint.safetensors import SafetensorsFile
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.layout import Layout
from jaxserve.models.loading import load_params
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.text.tokenizer import Tokenizer

open_gguf = functools.partial(GGUFCheckpoint, names_of=gguf_names)

REJECTIONS = (CheckpointError, UnsupportedModelError)
MAX_MESSAGE_CHARS = 1000
MAX_MEMORY_BYTES = 64 << 20


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder for files that each example of a test overwrites."""
    return tmp_path_factory.mktemp("hostile")


def rejection(load):
    """Returns the message with which a file is rejected, or None. Memory must stay small."""
    tracemalloc.start()
    try:
        load()
        message = None
    except REJECTIONS as error:
        message = str(error)
        assert len(message) < MAX_MESSAGE_CHARS, message[:200]
        assert "\n" not in message
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MAX_MEMORY_BYTES
    return message


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
def test_rejects_inconsistent_safetensors_headers(scratch, raw, words) -> None:
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
def test_safetensors_with_odd_headers_load_correctly_or_are_rejected(scratch, changes) -> None:
    header = json.loads(json.dumps(HEADER))
    for (*parents, key), value in changes:
        place = header
        for parent in parents:
            place = place[parent] if isinstance(place.get(parent), dict) else place
        place[key] = value
    check_safetensors(scratch, packed(header))


@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_safetensors_with_changed_bytes_load_correctly_or_are_rejected(
    scratch, seed, num_bytes
) -> None:
    rng, raw = random.Random(seed), bytearray(packed(HEADER))
    for _ in range(num_bytes):
        raw[rng.randrange(len(raw) - len(DATA))] = rng.choice(b'0123456789"{}[],:\x00\xff F')
    check_safetensors(scratch, bytes(raw))


def check_safetensors(scratch, raw):
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


# --- GGUF ---

CONFIG = tiny_config()
TOKENS = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), "ab", "he"]
U32, F32 = 4, 6


def field(key, kind, value):
    return text(key) + struct.pack("<I", kind) + encoded(kind, value)


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def encoded(kind, value):
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item, values = value
        head = struct.pack("<IQ", item, len(values))
        return head + b"".join(encoded(item, v) for v in values)
    return SCALARS[kind].pack(value)


FIELDS = {
    "general.architecture": (STRING, "llama"),
    "general.alignment": (U32, 32),
    "split.count": (U32, 1),
    "llama.block_count": (U32, 2),
    "llama.context_length": (U32, 128),
    "llama.embedding_length": (U32, 32),
    "llama.feed_forward_length": (U32, 64),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.attention.key_length": (U32, 8),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.attention.sliding_window": (U32, 0),
    "llama.expert_count": (U32, 0),
    "llama.rope.freq_base": (F32, 1e4),
    "llama.rope.dimension_count": (U32, 8),
    "llama.rope.scaling.type": (STRING, "yarn"),
    "llama.rope.scaling.factor": (F32, 2.0),
    "llama.rope.scaling.attn_factor": (F32, 1.5),
    "llama.rope.scaling.original_context_length": (U32, 64),
    "general.sampling.temp": (F32, 0.5),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "default"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
    "tokenizer.ggml.token_type": (ARRAY, (5, [2, 3, 3, *[1] * 28])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b", "h e"])),
    "tokenizer.ggml.bos_token_id": (U32, 1),
    "tokenizer.ggml.eos_token_id": (U32, 2),
    "tokenizer.ggml.unknown_token_id": (U32, 0),
    "tokenizer.ggml.add_bos_token": (7, True),
    "tokenizer.chat_template": (STRING, "{{ messages }}"),
}


def gguf_bytes(fields):
    """Returns a whole model with these fields, and float32 tensors of the sizes in `FIELDS`."""
    size, hidden, ffn = len(TOKENS), 32, 64
    shapes = {"token_embd.weight": (size, hidden), "output_norm.weight": (hidden,)}
    for i in range(2):
        layer = {
            **{"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (32, hidden)},
            **{"attn_k": (16, hidden), "attn_v": (16, hidden), "attn_output": (hidden, 32)},
            **{"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)},
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    entries, offset = [], 0
    for name, shape in shapes.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        entries.append(text(name) + dims + struct.pack("<IQ", 0, offset))
        offset += math.prod(shape) * 4
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields))
    head += b"".join(field(key, kind, value) for key, (kind, value) in fields.items())
    head += b"".join(entries)
    return head + bytes(-len(head) % 32) + bytes(offset)


def load_gguf(path):
    """Reads everything that the front and an engine need from a file before they serve it."""
    checkpoint = open_gguf(path)
    spec = read_spec(checkpoint.config)
    tokenizer = checkpoint.tokenizer()
    tokenizer.encode("hello")
    arrays = dict(checkpoint.tensors())
    assert checkpoint.num_bytes == sum(array.nbytes for array in arrays.values())
    return spec, tokenizer


def test_the_unchanged_gguf_file_loads(scratch) -> None:
    path = scratch / "good.gguf"
    path.write_bytes(gguf_bytes(FIELDS))
    assert rejection(lambda: load_gguf(path)) is None


SCALAR_VALUES = {
    **{0: st.integers(0, 255), 1: st.integers(-128, 127), 2: st.integers(0, 2**16 - 1)},
    **{3: st.integers(-(2**15), 2**15 - 1), 4: st.integers(0, 2**32 - 1)},
    **{5: st.integers(-(2**31), 2**31 - 1), 6: st.floats(width=32), 7: st.booleans()},
    **{10: st.integers(0, 2**64 - 1), 11: st.integers(-(2**63), 2**63 - 1), 12: st.floats()},
    STRING: st.text(max_size=5)
    | st.sampled_from(["llama", "qwen2", "gpt2", "llama-bpe", "linear", "a"]),
}
TYPED = st.sampled_from([*SCALAR_VALUES]).flatmap(
    lambda kind: (
        st.tuples(st.just(kind), SCALAR_VALUES[kind])
        | st.tuples(st.just(kind), st.just("0" if kind == STRING else 0))
        | st.tuples(
            st.just(ARRAY), st.tuples(st.just(kind), st.lists(SCALAR_VALUES[kind], max_size=3))
        )
    )
)


@pytest.mark.parametrize("key", FIELDS)
@given(value=TYPED)
@settings(max_examples=12, deadline=None)
def test_gguf_fields_of_another_type_or_value_load_or_are_rejected(scratch, key, value) -> None:
    path = scratch / "odd.gguf"
    path.write_bytes(gguf_bytes({**FIELDS, key: value}))
    rejection(lambda: load_gguf(path))


@pytest.mark.parametrize("key", FIELDS)
def test_gguf_files_without_a_field_load_or_are_rejected(scratch, key) -> None:
    path = scratch / "less.gguf"
    path.write_bytes(gguf_bytes({k: v for k, v in FIELDS.items() if k != key}))
    rejection(lambda: load_gguf(path))


@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_gguf_files_with_changed_bytes_load_or_are_rejected(scratch, seed, num_bytes) -> None:
    rng, raw = random.Random(seed), bytearray(gguf_bytes(FIELDS))
    for _ in range(num_bytes):
        raw[rng.randrange(3600)] = rng.choice((0, 1, 255, rng.randrange(256)))
    path = scratch / "bytes.gguf"
    path.write_bytes(raw)
    rejection(lambda: load_gguf(path))


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
def test_rejects_files_that_are_not_json_objects(folder, tmp_path, name, raw) -> None:
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
def test_an_index_cannot_name_files_in_other_folders(folder, tmp_path, file) -> None:
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
def test_configs_with_odd_values_are_read_or_rejected(key, value) -> None:
    """Any JSON value: an impossible model is rejected with a message and takes no memory."""
    config = json.loads(json.dumps({**CONFIG, key: value}, default=str))
    rejection(lambda: read_spec(config))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"]
)
def test_sizes_larger_than_the_weights_take_no_memory(scratch, key) -> None:
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
def test_odd_tokenizer_configs_are_read_or_rejected(folder, tmp_path, config) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def load():
        template = Tokenizer.from_folder(tmp_path).chat_template
        assert template is None or isinstance(template, str)

    rejection(load)


def test_rejects_a_chat_template_that_is_not_utf8(folder, tmp_path) -> None:
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
