"""Reads a GGUF file, which holds weights, configuration, tokenizer and chat template."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint import gguf_config
from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.checkpoint.gguf_dequantize import dequantize, output_dtype
from jaxserve.checkpoint.gguf_file import GGUFFile, GGUFTensor
from jaxserve.checkpoint.gguf_tokenizer import build_tokenizer
from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer import Tokenizer

METADATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

_QUANTIZATION_SUFFIX = re.compile(
    r"[.-]((I?Q|TQ)\d\w*|F16|F32|BF16|FP16|FP32|MXFP4\w*)$", re.IGNORECASE
)


class GGUFCheckpoint:
    """A `Checkpoint` read from a GGUF file.

    Opening it reads the metadata and the offsets of the tensors.

    Args:
      path: the file.
      names_of: returns the facts about the family of a GGUF architecture; see `registry.gguf_names`
        in `models`. Without it, only tokenizer and generation_config can be read.
      name: the name to serve the model under; None derives it from the file name, see
        `served_name`.

    Raises:
      CheckpointError: the file is damaged or incomplete; the message says where.
      UnsupportedModelError: the architecture is not supported.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str | None = None,
        names_of: Callable[[str], GGUFNames] | None = None,
    ) -> None:
        self.path = path
        self.name = name or served_name(path)
        self._file = GGUFFile(path)
        self._names_of = names_of
        with self._reporting_damage():
            self._read_metadata()

    def _read_metadata(self) -> None:
        path, file = self.path, self._file
        metadata = file.metadata
        if metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path} is one of {metadata['split.count']} parts; join them first with "
                "`llama-gguf-split --merge`"
            )
        gguf_config.architecture(metadata)
        if "token_embd.weight" not in file.tensors:
            raise CheckpointError(f"{path} has no tensor token_embd.weight")
        self.generation_config = gguf_config.hf_generation_config(metadata)
        if self._names_of is not None:  # to find what is wrong now, not when weights are read
            _ = self.config, self._tensors

    @functools.cached_property
    def _names(self) -> GGUFNames:
        assert self._names_of is not None, "opened for its tokenizer only"
        return self._names_of(gguf_config.architecture(self._file.metadata))

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json that the metadata stands for."""
        return self._config

    @functools.cached_property
    def _config(self) -> dict[str, Any]:
        tensors = self._file.tensors
        rope_factors = tensors.get(gguf_config.ROPE_FACTORS)
        with self._reporting_damage():
            return gguf_config.hf_config(
                self._file.metadata,
                self._names,
                vocab_size=tensors["token_embd.weight"].shape[0],
                tensor_names=tensors,
                rope_factors=rope_factors and self._array(rope_factors).tolist(),
            )

    @functools.cached_property
    def _tensors(self) -> dict[str, GGUFTensor]:
        """The tensors by their Hugging Face names."""
        return {
            gguf_config.hf_tensor_name(name, self._names.layer_tensors): tensor
            for name, tensor in self._file.tensors.items()
            if name != gguf_config.ROPE_FACTORS
        }

    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors, in the order in which `tensors` yields them."""
        return list(self._tensors)

    @property
    def num_bytes(self) -> int:
        """The total bytes of all arrays after dequantisation."""
        return sum(
            math.prod(tensor.shape) * output_dtype(tensor.type).itemsize
            for tensor in self._tensors.values()
        )

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name of each tensor and its array; quantised tensors become float32."""
        for name, tensor in self._tensors.items():
            yield name, self._array(tensor)

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer that the metadata describes."""
        with self._reporting_damage():
            return build_tokenizer(self._file.metadata)

    @contextlib.contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        """Turns errors from malformed metadata, which can hold any value, into CheckpointError."""
        try:
            yield
        except METADATA_ERRORS as error:
            raise CheckpointError(
                f"{self.path} is damaged: its metadata is inconsistent "
                f"({type(error).__name__}: {error!s:.200})"
            ) from error

    def _array(self, tensor: GGUFTensor) -> np.ndarray:
        rows = self._file.read(tensor)
        if self._names.rotates_pairs and (num_heads := self._rotated_heads(tensor.name)):
            with self._reporting_damage():
                rows = _pairs_to_halves(rows, tensor, num_heads)
        try:
            array = dequantize(rows, tensor.type).reshape(tensor.shape)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} is of type {tensor.type.name}, which is not "
                "supported; use a file with another quantisation, such as Q4_K_M or Q8_0"
            ) from error
        is_offset = self._names.norm_offset and tensor.name.endswith("norm.weight")
        return array - np.float32(self._names.norm_offset) if is_offset else array

    def _rotated_heads(self, name: str) -> int:
        """Returns the number of heads of a q or k projection, 0 for other tensors."""
        if re.search(r"\.attn_q\.(weight|bias)$", name):
            return self.config["num_attention_heads"]
        if re.search(r"\.attn_k\.(weight|bias)$", name):
            return self.config["num_key_value_heads"]
        return 0


def served_name(path: Path) -> str:
    """Returns the file name in lower case without quantisation and suffix.

    For example ``A-1B-Instruct.Q4_1.gguf`` is served as ``a-1b-instruct``.
    """
    stem = path.name.removesuffix(".gguf")
    return (_QUANTIZATION_SUFFIX.sub("", stem) or stem).lower()


def _pairs_to_halves(rows: np.ndarray, tensor: GGUFTensor, num_heads: int) -> np.ndarray:
    """Restores the order of rows of q and k projections, which the GGUF converter changes.

    In the file, the rows of a head of size d are in the order 0, d/2, 1, d/2 + 1, ..., so that the
    two rows of a rotated pair are adjacent. Only whole rows move, so stored rows can be reordered
    before they are dequantised.
    """
    if len(tensor.shape) == 1:  # a bias: each value is a row
        rows = rows.reshape(tensor.shape[0], -1)
    num_rows, row_bytes = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, row_bytes)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, row_bytes)
