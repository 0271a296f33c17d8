"""The declaration of a stage of the sampler: its parameters, its arrays and its function.

A declared stage is a program of its own that runs only in steps in which a request uses it, between
the programs of `jaxserve.sampling.sampler`. It reaches an engine through `sampling.registry`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Key, UInt32

from jaxserve.arrays import Leaf
from jaxserve.errors import ConfigError
from jaxserve.ipc.parameters import Parameter
from jaxserve.sampling.draw import row_keys
from jaxserve.sampling.inputs import LastTokens
from jaxserve.sampling.stages import Logits
from jaxserve.sampling_params import SamplingParams

__all__ = ["ALL_TOKENS", "NO_TOKEN", "Parameter", "Stage", "StageRows", "Values", "apply_stage"]

ALL_TOKENS = -1
"""The value of `Stage.num_tokens` that asks for all tokens of a request."""

NO_TOKEN = 2**31 - 1
"""Padding of `StageRows.tokens`. It is outside every vocabulary, so scatters skip it."""

LARGEST_LOGIT = 1e30
"""Larger logits of a stage act like this one. Temperature and penalties keep it finite."""

Values: TypeAlias = Mapping[str, Any]
"""The values of a stage's parameters in one request, by name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageRows:
    """The parameters and tokens of each row of logits, for one stage. R is padded.

    ``rows[name]`` is one of ``arrays``.

    Attributes:
      arrays: [R, ...] each, stacked from what `Stage.arrays` returns for each request. Rows that do
        not use the stage have the entries of the default parameters.
      is_on: i32[R], 1 if the row uses the stage, else 0.
      seeds: u32[R, 2], low and high half of the 64-bit seed.
      positions: i32[R], position of the sampled token in its request.
      num_output_tokens: i32[R], tokens generated so far; 0 in rows that do not use the stage.
      tokens: i32[R, N], the last N tokens of prompt and output, the newest one in column N - 1.
        `NO_TOKEN` before the first one, and in rows that do not use the stage. N is
        `Stage.num_tokens`, or one of a few sizes if that is `ALL_TOKENS`.
      pending_row: i32[R], the engine row in [0, S) whose last token the host has not seen, so that
        column N - 1 does not hold it; -1 if ``tokens`` is complete. A stage sees -1.
      salt: static, makes the random numbers of stages independent of each other.
    """

    arrays: dict[str, Any]
    is_on: Int32[Leaf, " rows"]
    seeds: UInt32[Leaf, "rows 2"]
    positions: Int32[Leaf, " rows"]
    num_output_tokens: Int32[Leaf, " rows"]
    tokens: Int32[Leaf, "rows n"]
    pending_row: Int32[Leaf, " rows"]
    salt: int = field(metadata={"static": True})

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def keys(self) -> Key[Array, " rows"]:
        """Returns a random key for each row, a function of its seed, its position and the stage."""
        keys = row_keys(self.seeds, self.positions)
        return jax.vmap(jax.random.fold_in, (0, None))(keys, self.salt)

    def with_pending(self, last_tokens: LastTokens) -> StageRows:
        """Returns the rows with the tokens that only the device knows."""
        if self.tokens.shape[1] == 0:
            return self
        newest = jnp.where(self.pending_row >= 0, last_tokens[self.pending_row], self.tokens[:, -1])
        return dataclasses.replace(
            self,
            tokens=self.tokens.at[:, -1].set(newest),
            pending_row=jnp.full_like(self.pending_row, -1),
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the sampler: a logits processor or a sampling filter.

    Attributes:
      name: unique among the stages of an engine.
      apply: ``(logits f32[R, V], rows) -> logits f32[R, V]``, a pure function that is compiled. The
        result of a row must not depend on other rows. The function may remove tokens, with -inf,
        but a token that is already removed stays removed. A row keeps its logits if it does not use
        the stage, or if the stage leaves it no token or a NaN.
      parameters: the parameters of requests, whose names no other stage has.
      is_filter: False for a logits processor, which also applies to greedy requests. It runs after
        masks, bad words and biases, and before penalties. True for a sampling filter, which applies
        to random requests only. It runs after temperature and min_p, and before top_k and top_p.
      is_on: tells whether a request with these values uses the stage. None: a request does if one
        of its values differs from the default, or if the stage has no parameters.
      arrays: returns the entries of one request in the arrays on the device, by name: numbers or
        numpy arrays. Names, shapes and dtypes must be the same for all values. Floats become f32,
        everything else becomes i32. None: one entry for each parameter that is a single number,
        boolean or token ID.
      num_tokens: how many of the last tokens the function sees, or `ALL_TOKENS`.
      warm_up: compile the stage at start-up. If False, its first request waits for the compilation.

    Raises:
      ConfigError: ``num_tokens`` is out of range.
    """

    name: str
    apply: Callable[[Any, StageRows], Any]
    parameters: tuple[Parameter, ...] = ()
    is_filter: bool = False
    is_on: Callable[[Values], bool] | None = None
    arrays: Callable[[Values], Mapping[str, Any]] | None = None
    num_tokens: int = 0
    warm_up: bool = True

    def __post_init__(self) -> None:
        if self.num_tokens < ALL_TOKENS:
            raise ConfigError(
                f"num_tokens of the stage {self.name} must be at least 0, or {ALL_TOKENS} for all "
                f"tokens, got {self.num_tokens}"
            )

    def values(self, params: SamplingParams) -> Values:
        """Returns the values of all parameters of the stage in a request."""
        given = params.extra_args or {}
        return {p.name: given.get(p.name, p.default) for p in self.parameters}

    def is_used_by(self, params: SamplingParams) -> bool:
        """Whether a request uses the stage."""
        if self.is_filter and params.is_greedy:
            return False
        values = self.values(params)
        if self.is_on is not None:
            return bool(self.is_on(values))
        return not values or any(values[p.name] != p.default for p in self.parameters)

    def entries(self, values: Values) -> dict[str, np.ndarray]:
        """Returns the entries of a request in `StageRows.arrays`, all f32 or i32."""
        if self.arrays is not None:
            given = self.arrays(values)
        else:
            single = [p.name for p in self.parameters if p.most is None and p.kind != "str"]
            given = {name: values[name] for name in single}
        entries = {name: np.asarray(value) for name, value in given.items()}
        return {
            name: value.astype(np.float32 if value.dtype.kind == "f" else np.int32)
            for name, value in entries.items()
        }

    def default_entries(self) -> dict[str, np.ndarray]:
        """Returns the entries of rows that do not use the stage."""
        return self.entries({p.name: p.default for p in self.parameters})

    def empty_rows(self, num_rows: int, num_tokens: int) -> StageRows:
        """Returns numpy arrays for ``num_rows`` rows, none of which uses the stage.

        ``num_tokens`` is the number of columns of `StageRows.tokens`.
        """
        entries = self.default_entries()
        fields: dict[str, Any] = {
            "arrays": {
                name: np.repeat(entry[None], num_rows, 0) for name, entry in entries.items()
            },
            "is_on": np.zeros(num_rows, np.int32),
            "seeds": np.zeros((num_rows, 2), np.uint32),
            "positions": np.zeros(num_rows, np.int32),
            "num_output_tokens": np.zeros(num_rows, np.int32),
            "tokens": np.full((num_rows, num_tokens), NO_TOKEN, np.int32),
            "pending_row": np.full(num_rows, -1, np.int32),
        }
        # `draw` folds the numbers of its rounds, which are small, into the same keys.
        return StageRows(**fields, salt=0x80000000 | zlib.crc32(self.name.encode()))


def apply_stage(stage: Stage, logits: Logits, last_tokens: LastTokens, rows: StageRows) -> Logits:
    """Applies a stage to the rows that use it; see `Stage.apply`.

    Args:
      stage: the stage.
      logits: f32[R, V], finite or -inf.
      last_tokens: i32[S], the last token of each engine row.
      rows: the parameters and tokens of each row.
    """
    changed = stage.apply(logits, rows.with_pending(last_tokens))
    changed = jnp.where(logits == -jnp.inf, -jnp.inf, jnp.minimum(changed, LARGEST_LOGIT))
    # False for NaN, which `max` propagates.
    is_usable = changed.max(-1) > -jnp.inf
    is_changed = (rows.is_on > 0) & is_usable
    return jnp.where(is_changed[:, None], changed, logits)
