"""Untrusted GGUF files either load or are rejected with a one-line error; see test_files.py."""

import functools
import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.gguf import GGUFCheckpoint
from jaxserve.checkpoint.gguf_file import ARRAY, SCALARS, STRING
from jaxserve.models.registry import gguf_names, read_spec

open_gguf = functools.partial(GGUFCheckpoint, names_of=gguf_names)
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


def test_the_unchanged_gguf_file_loads(scratch, rejection) -> None:
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
def test_gguf_fields_of_another_type_or_value_load_or_are_rejected(
    scratch, key, value, rejection
) -> None:
    path = scratch / "odd.gguf"
    path.write_bytes(gguf_bytes({**FIELDS, key: value}))
    rejection(lambda: load_gguf(path))


@pytest.mark.parametrize("key", FIELDS)
def test_gguf_files_without_a_field_load_or_are_rejected(scratch, key, rejection) -> None:
    path = scratch / "less.gguf"
    path.write_bytes(gguf_bytes({k: v for k, v in FIELDS.items() if k != key}))
    rejection(lambda: load_gguf(path))


@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_gguf_files_with_changed_bytes_load_or_are_rejected(
    scratch, seed, num_bytes, rejection
) -> None:
    rng, raw = random.Random(seed), bytearray(gguf_bytes(FIELDS))
    for _ in range(num_bytes):
        raw[rng.randrange(3600)] = rng.choice((0, 1, 255, rng.randrange(256)))
    path = scratch / "bytes.gguf"
    path.write_bytes(raw)
    rejection(lambda: load_gguf(path))
