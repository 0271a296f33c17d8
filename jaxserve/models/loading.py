"""Builds a model and fills it from a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxserve.checkpoint import mapping
from jaxserve.models.causal_lm import CausalLM, Loop
from jaxserve.models.registry import model_class
from jaxserve.models.spec import ModelSpec

logger = logging.getLogger("jaxserve")

Params = dict[str, Any]
"""Nested dicts of device arrays; the keys are attributes and indices in a list of layers."""


@runtime_checkable
class TensorSource(Protocol):
    """The part of a checkpoint's interface that loading needs."""

    @property
    def tensor_names(self) -> list[str]: ...

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]: ...


def build_model(spec: ModelSpec, *, loop: Loop) -> CausalLM:
    """Returns a model whose parameters have shapes and no values."""
    return model_class(spec.architecture)(spec, loop=loop)


def load_params(
    checkpoint: TensorSource,
    spec: ModelSpec,
    *,
    dtype: str,
    loop: Loop,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """Reads the weights of a model. ``nnx.merge`` makes the model from the two results.

    Checkpoints of the base model, whose names lack the prefix "model.", are accepted too. Tensors
    that do not belong to the model, such as the state of an optimizer, are skipped with a warning.

    Peak memory is the weights, the tensor that is being read and, on a device with its own memory,
    the parameter that is being copied to it.

    Args:
      checkpoint: yields one tensor at a time.
      spec: the shape of the model.
      dtype: dtype of the parameters, a numpy name.
      loop: the layout of the layers, see `CausalLM`.
      on_progress: called after each tensor with the bytes of parameters set so far and in total.

    Raises:
      CheckpointError: a tensor of the model is unknown, duplicate or missing, or has the wrong
        shape.
      UnsupportedModelError: a tensor holds integers.
    """
    model = build_model(spec, loop=loop)
    targets = _targets(model)
    destinations = mapping.assign(model.RULES, targets, num_layers=spec.num_layers)
    full_names = _full_names(checkpoint.tensor_names, destinations)
    names = [full_names[name] for name in checkpoint.tensor_names]
    ignored = _ignored(model)
    ignored |= _foreign(names, model, known=ignored)
    mapping.check_names(names, destinations, ignored=ignored)
    param_dtype = jnp.dtype(dtype)
    total = sum(math.prod(target.shape) for target in targets.values()) * param_dtype.itemsize
    done = 0
    arrays: dict[tuple[str | int, ...], jax.Array] = {}

    def renamed(named: tuple[str, np.ndarray]) -> tuple[str, np.ndarray]:
        return full_names[named[0]], named[1]

    # A generator would keep the previous tensor alive while it reads the next one.
    tensors = map(renamed, checkpoint.tensors())
    filling = mapping.assemble(tensors, destinations, targets, dtype=param_dtype, ignored=ignored)
    for placed in filling:
        done += placed.num_bytes
        if placed.complete is not None:
            arrays[_path(placed.target)] = jax.device_put(placed.complete)
        if on_progress is not None:
            on_progress(done, total)
    graphdef, _ = nnx.split(model)
    return graphdef, traverse_util.unflatten_dict(arrays)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor in a checkpoint of a model."""
    model = build_model(spec, loop="unroll")
    destinations = mapping.assign(model.RULES, _targets(model), num_layers=spec.num_layers)
    return {
        name: destination.shape[::-1]
        if destination.transform is mapping.transpose
        else destination.shape
        for name, destination in destinations.items()
    }


def abstract_params(
    spec: ModelSpec, *, dtype: str, loop: Loop
) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """Returns the results of `load_params` with a ShapeDtypeStruct in place of each array."""
    model = build_model(spec, loop=loop)
    shapes = {
        _path(path): jax.ShapeDtypeStruct(target.shape, jnp.dtype(dtype))
        for path, target in _targets(model).items()
    }
    return nnx.split(model)[0], traverse_util.unflatten_dict(shapes)


def _targets(model: CausalLM) -> dict[str, mapping.Target]:
    """Returns every parameter by path; ``*`` stands for the layer in stacked parameters."""
    is_stacked = model.loop == "scan"
    targets = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if is_stacked and path[0] == "layers":
            path = ("layers", "*", *path[1:])
        targets[".".join(map(str, path))] = mapping.Target(param.shape, param.parts)
    return targets


def _path(target: str) -> tuple[str | int, ...]:
    steps = [step for step in target.split(".") if step != "*"]
    return tuple(int(step) if step.isdigit() else step for step in steps)


def _full_names(
    names: Sequence[str], destinations: Mapping[str, mapping.Destination], *, prefix: str = "model."
) -> dict[str, str]:
    """Maps each name to its name in the full model, in case the checkpoint is of the base model."""
    if any(name.startswith(prefix) for name in names):
        return {name: name for name in names}
    own = {name.split(".")[1] for name in destinations if name.startswith(prefix)}
    return {name: prefix + name if name.split(".")[0] in own else name for name in names}


def _foreign(names: Sequence[str], model: CausalLM, *, known: frozenset[str]) -> frozenset[str]:
    """Returns the tensors whose names show that they do not belong to the model, with a warning."""
    own = {rule.name.split(".")[0] for rule in model.RULES}
    foreign = [n for n in names if n not in known and n.split(".")[0] not in own]
    if foreign:
        logger.warning("skipped tensors that do not belong to the model: %s", mapping.some(foreign))
    return frozenset(foreign)


def _ignored(model: CausalLM) -> frozenset[str]:
    names = model.IGNORED + (model.COPIES_OF_TIED if model.spec.tied_head else ())
    layers = range(model.spec.num_layers)
    return frozenset(name.replace("{layer}", str(layer)) for name in names for layer in layers)
