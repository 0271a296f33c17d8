"""Sampling inputs with neutral parameters."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.inputs import SamplingInputs


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., SamplingInputs]:
    """``make_rows(num_rows, vocab_size, **fields)``: arrays or scalars replace the defaults."""

    def make(num_rows: int, vocab_size: int, **fields: object) -> SamplingInputs:
        plain = {
            "kept_in_row": np.arange(num_rows, dtype=np.int32),
            "positions": np.zeros(num_rows, np.int32),
            "seeds": np.stack([np.arange(num_rows), np.zeros(num_rows)], 1).astype(np.uint32),
            "temperature": np.ones(num_rows, np.float32),
            "top_k": np.full(num_rows, vocab_size, np.int32),
            "top_p": np.ones(num_rows, np.float32),
            "min_p": np.zeros(num_rows, np.float32),
            "repetition": np.ones(num_rows, np.float32),
            "frequency": np.zeros(num_rows, np.float32),
            "presence": np.zeros(num_rows, np.float32),
        }
        for name, value in fields.items():
            if name in plain:
                old = plain[name]
                plain[name] = np.broadcast_to(np.asarray(value, old.dtype), old.shape)
        arrays = {name: jnp.asarray(value) for name, value in plain.items()}
        others = {name: value for name, value in fields.items() if name not in plain}
        return dataclasses.replace(SamplingInputs(**arrays), **others)

    return make
