"""The interface of a checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.text.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model on disk. Opening it reads headers and configuration, never the weights.

    Names, shapes and configuration follow the Hugging Face format of the model, even if the files
    have another format.
    """

    @property
    def name(self) -> str:
        """The name to serve the model under, such as ``smollm2-135m-instruct``."""
        ...

    @property
    def path(self) -> Path:
        """The folder or file that was opened."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``, including ``architectures``."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """The contents of ``generation_config.json``, if there is such a file.

        ``eos_token_id`` is that of ``config.json`` if the file has none.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Total bytes of the arrays that `tensors` yields."""
        ...

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that `tensors` yields, in the same order."""
        ...

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each name and array, one at a time, in the order of the file.

        Arrays are read-only views of the mapped file where possible. Quantised tensors are
        converted to float32; others keep the dtype of the file (bfloat16 comes from ml_dtypes).

        Raises:
          CheckpointError: a tensor cannot be read; the message names it.
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer of the checkpoint.

        Raises:
          CheckpointError: the checkpoint has no tokenizer, or it cannot be read.
        """
        ...
