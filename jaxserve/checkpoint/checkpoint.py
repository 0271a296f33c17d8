"""What a checkpoint is to the rest of jaxserve, whatever the files look like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.text.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model on disk. Opening one reads headers and configuration, never the weights.

    Names, shapes and configuration are those of the Hugging Face form of the model, also when the
    files are in another form.
    """

    @property
    def name(self) -> str:
        """A short name to serve the model under, such as ``smollm2-135m-instruct``."""
        ...

    @property
    def path(self) -> Path:
        """The folder or file that was opened."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``, with ``architectures``."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """The contents of ``generation_config.json``; empty when there is none."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields together."""
        ...

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that `tensors` yields, in the same order."""
        ...

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each name and array, one at a time, in the order of the file.

        Arrays are read-only views of the mapped file where that is possible. Quantised tensors
        come as float32, others in the type of the file (bfloat16 is that of ml_dtypes).

        Raises:
          CheckpointError: a tensor cannot be read; the message names it.
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer of the checkpoint.

        Raises:
          CheckpointError: there is none, or it cannot be read.
        """
        ...
