"""From the tensors of a checkpoint to the parameters of a model: which goes where, and the checks.

A family lists `Rule`s. Together with the parameters of a model of certain sizes they give, before
anything is read, the exact set of names that its checkpoint has to have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError


def unchanged(tensor: np.ndarray) -> np.ndarray:
    """The tensor as it is."""
    return tensor


def transpose(tensor: np.ndarray) -> np.ndarray:
    """[out, in], as checkpoints have matrices, to [in, out]."""
    return tensor.T


@dataclass(frozen=True, slots=True)
class Rule:
    """Where the tensors of a kind go.

    Attributes:
      name: of the tensor in a checkpoint; ``{layer}`` stands for the number of a layer, ``{part}``
        for the name of a part of the parameter.
      target: path of the parameter, joined by dots; ``*`` stands for the number of the layer.
      transform: what to do to the tensor; returns a view where it can.
    """

    name: str
    target: str
    transform: Callable[[np.ndarray], np.ndarray] = unchanged


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter to fill.

    Attributes:
      shape: its shape; the first axis is that of the layers if its path has a ``*``.
      parts: name and size of the pieces of the last axis that come as tensors of their own.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor: ``index`` in the parameter ``target``, of shape ``shape``."""

    target: str
    index: tuple[int | slice | EllipsisType, ...]
    shape: tuple[int, ...]
    transform: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Placed:
    """What has been done with a tensor.

    Attributes:
      target: path of its parameter.
      num_bytes: how much of the parameter it has set.
      complete: the parameter, if this was the last of its tensors.
    """

    target: str
    num_bytes: int
    complete: np.ndarray | None


def plan(
    rules: Sequence[Rule], targets: Mapping[str, Target], *, num_layers: int
) -> dict[str, Slot]:
    """The place of every tensor that a checkpoint of this model has, by name.

    Rules for parameters that the model does not have are left out: a tensor of that name is then
    an unknown one.
    """
    slots: dict[str, Slot] = {}
    for rule in rules:
        for layer in range(num_layers) if "{layer}" in rule.name else (0,):
            path = rule.target if rule.target in targets else rule.target.replace("*", str(layer))
            if path not in targets:
                continue
            is_stacked = "*" in path
            for part, columns, size in _pieces(rule, targets[path]):
                name = rule.name.replace("{layer}", str(layer)).replace("{part}", part)
                assert name not in slots, f"more than one rule is for {name}"
                shape = (*targets[path].shape[is_stacked:-1], size)
                index = (*((layer,) if is_stacked else ()), ..., columns)
                slots[name] = Slot(path, index, shape, rule.transform)
    filled = {slot.target for slot in slots.values()}
    assert filled == set(targets), f"no rule fills {set(targets) - filled}"
    return slots


def check_names(
    names: Sequence[str], slots: Mapping[str, Slot], *, ignored: frozenset[str]
) -> None:
    """Compares the names in a checkpoint with those that the model needs.

    Raises:
      CheckpointError: a name is unknown, there twice, or missing.
    """
    present = set(names)
    if len(present) != len(names):
        twice = sorted(name for name in present if names.count(name) > 1)
        raise CheckpointError(f"the checkpoint has {some(twice)} more than once")
    unknown = [name for name in names if name not in slots and name not in ignored]
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {some(unknown)}, which the model of its config.json does not have"
        )
    missing = [name for name in slots if name not in present]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {some(missing)}")


def assemble(
    tensors: Iterable[tuple[str, np.ndarray]],
    slots: Mapping[str, Slot],
    targets: Mapping[str, Target],
    *,
    dtype: np.dtype,
    ignored: frozenset[str],
) -> Iterator[Placed]:
    """Puts tensors into parameters, one tensor at a time, converted to ``dtype``.

    Raises:
      CheckpointError: a tensor is unknown, comes twice, never comes, or has the wrong shape.
      UnsupportedModelError: a tensor holds whole numbers.
    """
    missing: dict[str, set[str]] = {path: set() for path in targets}
    for name, slot in slots.items():
        missing[slot.target].add(name)
    buffers: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if name in ignored:
            continue
        if name not in slots:
            raise CheckpointError(f"the checkpoint has {name}, which is not part of the model")
        target = slots[name].target
        if name not in missing[target]:
            raise CheckpointError(f"the checkpoint has {name} more than once")
        missing[target].remove(name)
        value = _checked(name, tensor, slots[name])  # before there is memory for it
        if target not in buffers:
            buffers[target] = _empty(targets[target].shape, dtype)
        buffers[target][slots[name].index] = value
        num_bytes = value.size * dtype.itemsize
        # Nothing here may hold on to a complete parameter: it is about to be moved to the device.
        yield Placed(target, num_bytes, None if missing[target] else buffers.pop(target))
    never = [name for names in missing.values() for name in names]
    if never:
        raise CheckpointError(f"the checkpoint lacks {some(sorted(never))}")


def _checked(name: str, tensor: np.ndarray, slot: Slot) -> np.ndarray:
    """A tensor as its parameter has it."""
    value = slot.transform(tensor)
    if value.shape != slot.shape:
        how = "" if slot.transform is unchanged else f" after {slot.transform.__name__}"
        raise CheckpointError(f"{name} must have the shape {slot.shape}{how}, got {value.shape}")
    if value.dtype.kind in "iub":  # bfloat16 is of the kind V
        raise UnsupportedModelError(
            f"{name} is of type {value.dtype}: weights that are quantised in this way are not "
            "supported; use a float checkpoint, or GGUF"
        )
    return value


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that JAX can take over on a CPU without copying it, as its memory is aligned."""
    alignment = 64
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _pieces(rule: Rule, target: Target) -> Iterator[tuple[str, slice, int]]:
    """Name, place and size on the last axis of each tensor that a rule takes for a target."""
    if "{part}" not in rule.name:
        yield "", slice(None), target.shape[-1]
        return
    start = 0
    for part, size in target.parts:
        yield part, slice(start, start + size), size
        start += size


def some(names: Sequence[str]) -> str:
    """The names, or the first few of many."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
