"""The declaration of a stage of the sampler: its parameters, its arrays and its function.

A declared stage is a program of its own that runs only in steps in which a request uses it, between
the programs of `jaxserve.sampling.sampler`. It reaches an engine through `sampling.registry`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Key, UInt32

from jaxserve.arrays import Leaf
from jaxserve.errors import ConfigError
from jaxserve.ipc.parameters import Parameter, is_integer
from jaxserve.sampling.draw import row_keys
from jaxserve.sampling.inputs import LastTokens
from jaxserve.sampling.stages import Logits
from jaxserve.sampling_params import SamplingParams

__all__ = [
    "ALL_TOKENS",
    "NO_TOKEN",
    "Parameter",
    "Stage",
    "StageRows",
    "Values",
    "apply_stage",
    "check_function",
]

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
      name: unique among the stages of an engine, not empty.
      apply: ``(logits f32[R, V], rows) -> logits f32[R, V]``, a pure function that is compiled. The
        result of a row must not depend on other rows. The function may remove tokens, with -inf,
        but a token that is already removed stays removed. A row keeps its logits if it does not use
        the stage, or if the stage leaves it no token or a NaN. `check_function` calls it for all
        shapes at start-up. An exception after that, such as one in a host callback of the function,
        ends the engine.
      parameters: the parameters of requests, whose names no other stage has.
      is_filter: False for a logits processor, which also applies to greedy requests. It runs after
        masks, bad words and biases, and before penalties. True for a sampling filter, which applies
        to random requests only. It runs after temperature and min_p, and before top_k and top_p.
      is_on: tells whether a request with these values uses the stage. None: a request does if one
        of its values differs from the default, or if the stage has no parameters. It runs on the
        host: at start-up on the default values; for each request when the request arrives and each
        time it starts to run, so its result must depend on the values only. A request is refused if
        an exception is raised when it arrives; an exception after that ends the engine.
      arrays: returns the entries of one request in the arrays on the device, by name: numbers or
        numpy arrays. Names, shapes and dtypes must be the same for all values. Floats become f32,
        everything else becomes i32. None: one entry for each parameter that is a single number,
        boolean or token ID. It runs when `is_on` does, with the same consequences.
      num_tokens: how many of the last tokens the function sees, or `ALL_TOKENS`.
      warm_up: compile the stage at start-up. If False, its first request waits for the compilation.

    Raises:
      ConfigError: ``name``, ``parameters`` or ``num_tokens`` is invalid.
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
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a stage must have a string as name, not empty, got {self.name!r}")
        if not isinstance(self.parameters, tuple) or not all(
            isinstance(parameter, Parameter) for parameter in self.parameters
        ):
            raise ConfigError(
                f"parameters of the stage {self.name} must be a tuple of Parameter objects, got "
                f"{self.parameters!r}"
            )
        for name, count in Counter(parameter.name for parameter in self.parameters).items():
            if count > 1:
                raise ConfigError(
                    f"the stage {self.name} declares the parameter {name!r} {count} times"
                )
        if not is_integer(self.num_tokens) or self.num_tokens < ALL_TOKENS:
            raise ConfigError(
                f"num_tokens of the stage {self.name} must be an integer of at least 0, or "
                f"{ALL_TOKENS} for all tokens, got {self.num_tokens!r}"
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

    @functools.cached_property
    def default_entries(self) -> Mapping[str, np.ndarray]:
        """The entries of rows that do not use the stage."""
        return self.entries({p.name: p.default for p in self.parameters})

    def empty_rows(self, num_rows: int, num_tokens: int) -> StageRows:
        """Returns numpy arrays for ``num_rows`` rows, none of which uses the stage.

        ``num_tokens`` is the number of columns of `StageRows.tokens`.
        """
        entries = self.default_entries
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

    Raises:
      ConfigError: the function does not return logits of the same shape and dtype.
    """
    changed = stage.apply(logits, rows.with_pending(last_tokens))
    expected, got = _form(logits), _form(changed)
    if got != expected:
        raise ConfigError(f"the stage {stage.name} must return logits {expected}, got {got}")
    changed = jnp.where(logits == -jnp.inf, -jnp.inf, jnp.minimum(changed, LARGEST_LOGIT))
    # On a CPU, `max` drops NaN.
    is_usable = (changed.max(-1) > -jnp.inf) & ~jnp.isnan(changed).any(-1)
    is_changed = (rows.is_on > 0) & is_usable
    return jnp.where(is_changed[:, None], changed, logits)


def check_function(stage: Stage, vocab_size: int, shapes: Iterable[tuple[int, int]]) -> None:
    """Traces the function of a stage, without compiling it, for some shapes.

    Args:
      stage: the stage.
      vocab_size: V.
      shapes: the numbers of rows R of the logits, and of tokens N in `StageRows.tokens`.

    Raises:
      ConfigError: the function fails, or does not return logits f32[R, V].
    """
    last_tokens = jax.ShapeDtypeStruct((1,), np.int32)
    for num_rows, num_tokens in shapes:
        logits = jax.ShapeDtypeStruct((num_rows, vocab_size), np.float32)
        rows = stage.empty_rows(num_rows, num_tokens)
        try:
            jax.eval_shape(functools.partial(apply_stage, stage), logits, last_tokens, rows)
        except ConfigError:
            raise
        except Exception as error:
            tokens = f" with {num_tokens} tokens per row" if num_tokens else ""
            raise ConfigError(
                f"the stage {stage.name} failed on logits {_form(logits)}{tokens}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _form(value: Any) -> str:
    """Returns dtype and shape of an array, or the type of anything else."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return type(value).__name__
    return f"{value.dtype}{list(value.shape)}"
