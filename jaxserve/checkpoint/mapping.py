"""Maps the tensors of a checkpoint to the parameters of a model, and checks them.

A model family lists `Rule`s. `assign` applies them to the parameters of one model and returns the
exact set of tensors that its checkpoint must hold, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError


def unchanged(tensor: np.ndarray) -> np.ndarray:
    """Returns the tensor without a change."""
    return tensor


def transpose(tensor: np.ndarray) -> np.ndarray:
    """Turns a matrix ``[out, in]``, the layout of checkpoints, into ``[in, out]``."""
    return tensor.T


@dataclass(frozen=True, slots=True)
class Rule:
    """Maps one kind of tensor to a parameter.

    Attributes:
      name: name of the tensor in a checkpoint; ``{layer}`` stands for the number of a layer,
        ``{part}`` for the name of a part of the parameter.
      target: path of the parameter, joined by dots; ``*`` stands for the number of the layer.
      transform: applied to the tensor; returns a view where possible.
    """

    name: str
    target: str
    transform: Callable[[np.ndarray], np.ndarray] = unchanged


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter to fill.

    A checkpoint stores a vector or a matrix. The parameter splits the axes of that matrix further:
    its first ``num_rows`` axes are the rows, the others are the columns.

    Attributes:
      shape: shape of the parameter; if its path has a ``*``, the first axis is the layer.
      num_rows: the number of axes, not counting the layer, that are the rows; 0: a vector.
      parts: names and sizes of the parts of one axis, if each part is a separate tensor.
      parts_axis: that axis, not counting the layer.
    """

    shape: tuple[int, ...]
    num_rows: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    parts_axis: int = 0


@dataclass(frozen=True, slots=True)
class Destination:
    """The place of one tensor in a parameter.

    Attributes:
      target: path of the parameter.
      index: place in the parameter.
      shape: shape that the tensor must have after ``transform``.
      place_shape: shape of ``parameter[index]``, which has as many elements.
      transform: applied to the tensor before it is placed.
    """

    target: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]
    place_shape: tuple[int, ...]
    transform: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor that has been copied into its parameter.

    Attributes:
      target: path of the parameter.
      num_bytes: bytes of the parameter that this tensor filled.
      complete: the whole parameter, if this was its last tensor, else None.
    """

    target: str
    num_bytes: int
    complete: np.ndarray | None


def assign(
    rules: Sequence[Rule], targets: Mapping[str, Target], *, num_layers: int
) -> dict[str, Destination]:
    """Returns the destination of every tensor that a checkpoint of this model must hold, by name.

    A rule whose parameter the model does not have is skipped, so a tensor of that name counts as
    unknown.
    """
    destinations: dict[str, Destination] = {}
    for rule in rules:
        for layer in range(num_layers) if "{layer}" in rule.name else (0,):
            path = rule.target if rule.target in targets else rule.target.replace("*", str(layer))
            if path not in targets:
                continue
            is_stacked = "*" in path  # the parameters of all layers are one array
            target, index = targets[path], (layer,) if is_stacked else ()
            for part, where, place_shape in _parts(rule, target, target.shape[is_stacked:]):
                name = rule.name.replace("{layer}", str(layer)).replace("{part}", part)
                assert name not in destinations, f"more than one rule is for {name}"
                rows, columns = place_shape[: target.num_rows], place_shape[target.num_rows :]
                shape = (*((math.prod(rows),) if rows else ()), math.prod(columns))
                destinations[name] = Destination(
                    path, (*index, *where), shape, place_shape, rule.transform
                )
    filled = {destination.target for destination in destinations.values()}
    assert filled == set(targets), f"no rule fills {set(targets) - filled}"
    return destinations


def check_names(
    names: Sequence[str], destinations: Mapping[str, Destination], *, ignored: frozenset[str]
) -> None:
    """Compares the names in a checkpoint with those that the model needs.

    Raises:
      CheckpointError: a name is unknown, missing, or present twice.
    """
    present = set(names)
    if len(present) != len(names):
        twice = sorted(name for name in present if names.count(name) > 1)
        raise CheckpointError(f"the checkpoint has {some(twice)} more than once")
    unknown = [name for name in names if name not in destinations and name not in ignored]
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {some(unknown)}, which the model of its config.json does not have"
        )
    missing = [name for name in destinations if name not in present]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {some(missing)}")


def assemble(
    tensors: Iterable[tuple[str, np.ndarray]],
    destinations: Mapping[str, Destination],
    targets: Mapping[str, Target],
    *,
    dtype: np.dtype,
    ignored: frozenset[str],
) -> Iterator[Placed]:
    """Copies tensors into parameters, one tensor at a time, converted to ``dtype``.

    Raises:
      CheckpointError: a tensor is unknown, missing, present twice, or has the wrong shape.
      UnsupportedModelError: a tensor holds integers.
    """
    missing: dict[str, set[str]] = {path: set() for path in targets}
    for name, destination in destinations.items():
        missing[destination.target].add(name)
    buffers: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if name in ignored:
            continue
        if name not in destinations:
            raise CheckpointError(f"the checkpoint has {name}, which is not part of the model")
        target = destinations[name].target
        if name not in missing[target]:
            raise CheckpointError(f"the checkpoint has {name} more than once")
        missing[target].remove(name)
        value = _checked(name, tensor, destinations[name])  # before its parameter is allocated
        if target not in buffers:
            buffers[target] = aligned(targets[target].shape, dtype)
        # Splitting axes makes a view, even of a transposed matrix.
        buffers[target][destinations[name].index] = value.reshape(destinations[name].place_shape)
        num_bytes = value.size * dtype.itemsize
        # Keep no reference to a complete parameter: the caller moves it to the device.
        yield Placed(target, num_bytes, None if missing[target] else buffers.pop(target))
    never = [name for names in missing.values() for name in names]
    if never:
        raise CheckpointError(f"the checkpoint lacks {some(sorted(never))}")


def _checked(name: str, tensor: np.ndarray, destination: Destination) -> np.ndarray:
    """Returns the transformed tensor. Raises unless it has the expected shape and a float dtype."""
    value = destination.transform(tensor)
    if value.shape != destination.shape:
        how = (
            "" if destination.transform is unchanged else f" after {destination.transform.__name__}"
        )
        raise CheckpointError(
            f"{name} must have the shape {destination.shape}{how}, got {value.shape}"
        )
    if value.dtype.kind in "iub":  # bfloat16 is of the kind V
        raise UnsupportedModelError(
            f"{name} is of type {value.dtype}: integer weights are not supported; use a float "
            "checkpoint or a GGUF file"
        )
    return value


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an empty array in aligned memory, which JAX on a CPU uses without a copy."""
    alignment = 64
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _parts(
    rule: Rule, target: Target, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[slice, ...], tuple[int, ...]]]:
    """Yields name, index and shape of each part of a parameter.

    ``shape`` is that of the parameter in one layer, and the indices are within the layer.
    """
    everywhere = (slice(None),) * len(shape)
    if "{part}" not in rule.name:
        yield "", everywhere, shape
        return
    start, axis = 0, target.parts_axis
    for part, size in target.parts:
        where = (*everywhere[:axis], slice(start, start + size), *everywhere[axis + 1 :])
        yield part, where, (*shape[:axis], size, *shape[axis + 1 :])
        start += size


def some(names: Sequence[str], limit: int = 3) -> str:
    """Returns the first ``limit`` names, each cut at 100 characters, and the number of the rest."""
    rest = len(names) - limit
    shown = ", ".join(f"{name:.100}" for name in names[:limit])
    return shown + (f" and {rest} more" if rest > 0 else "")
