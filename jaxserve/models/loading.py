"""Builds a model and fills it from a checkpoint."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxserve.checkpoint import mapping
from jaxserve.errors import CheckpointError
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.layout import Layout
from jaxserve.models.registry import model_class
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import Source
from jaxserve.ops.linear import Dense

logger = logging.getLogger("jaxserve")

ShardingOf = Callable[[tuple[str, ...]], jax.sharding.Sharding | None]
"""Returns the devices of an array with these axis names; None: the default device of jax."""

Params = dict[str, Any]
"""Nested dicts of device arrays; the keys are attributes and indices in a list of layers."""

Keys = tuple[str | int, ...]
"""The keys that lead to an array or a module in `Params`."""

Shardings = Mapping[Keys, jax.sharding.Sharding | None]
"""The devices of each array, by its keys; see `ShardingOf`."""


@runtime_checkable
class TensorSource(Protocol):
    """The part of a checkpoint's interface that loading needs."""

    @property
    def tensor_names(self) -> list[str]: ...

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]: ...


def on_default_device(names: tuple[str, ...]) -> None:
    """Leaves an array whole: the `ShardingOf` of one device."""
    del names


def build_model(spec: ModelSpec, layout: Layout) -> CausalLM:
    """Returns a model whose parameters are declared, and have no values.

    The value of each parameter is its `ArraySpec`, with the names of its axes.
    """
    return model_class(spec.architecture)(spec, layout)


def load_params(
    checkpoint: TensorSource,
    spec: ModelSpec,
    layout: Layout,
    *,
    sharding: ShardingOf = on_default_device,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """Reads the weights of a model. ``nnx.merge`` makes the model from the two results.

    Checkpoints of the base model, whose names lack the prefix "model.", are accepted too. Tensors
    that do not belong to the model, such as the state of an optimizer, are skipped with a warning.

    Peak memory is the weights, the tensor that is being read, the weights of a layer that are being
    encoded and, on a device with its own memory, the parameter that is being copied to it.

    Args:
      checkpoint: yields one tensor at a time.
      spec: the shape of the model.
      layout: the dtype, loop, format and cut of the weights.
      sharding: the devices of each array. Each device receives only its part.
      on_progress: called after each tensor with the bytes of parameters set so far and in total,
        in the dtype of the layout.

    Raises:
      CheckpointError: a tensor of the model is unknown, duplicate or missing, or has the wrong
        shape.
      UnsupportedModelError: a tensor holds integers.
    """
    model = build_model(spec, layout)
    parameters = _parameters(model)
    targets = {path: parameter.target for path, parameter in parameters.items()}
    destinations = mapping.assign(model.RULES, targets, num_layers=spec.num_layers)
    full_names = _full_names(checkpoint.tensor_names, destinations)
    names = [full_names[name] for name in checkpoint.tensor_names]
    ignored = _ignored(model)
    ignored |= _foreign(names, model, known=ignored)
    mapping.check_names(names, destinations, ignored=ignored)
    dtype = jnp.dtype(layout.dtype)
    total = sum(math.prod(target.shape) for target in targets.values()) * dtype.itemsize
    done = 0
    shardings = jax.tree.map(lambda one: sharding(one.names), _declared(model, layout))
    arrays = _Arrays(spec.num_layers, cast(Shardings, traverse_util.flatten_dict(shardings)))

    def renamed(named: tuple[str, np.ndarray]) -> tuple[str, np.ndarray]:
        return full_names[named[0]], named[1]

    # A generator would keep the previous tensor alive while it reads the next one.
    tensors = map(renamed, checkpoint.tensors())
    filling = mapping.assemble(tensors, destinations, targets, dtype=dtype, ignored=ignored)
    for placed in filling:
        done += placed.num_bytes
        if placed.complete is not None:
            arrays.add(parameters[placed.target], placed.complete)
        if on_progress is not None:
            on_progress(done, total)
    graphdef, _ = nnx.split(model)
    return graphdef, arrays.tree


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter to fill.

    Attributes:
      target: its shape, for the mapping of tensors.
      source: its axes and format.
      module: path of its module in `Params`.
      layer: its place in the arrays of the loop "scan", if it is a part of them.
    """

    target: mapping.Target
    source: Source
    module: Keys
    layer: int | None = None


class _Arrays:
    """The arrays of a model, made from its parameters and moved to their devices."""

    def __init__(self, num_layers: int, shardings: Shardings) -> None:
        self._num_layers = num_layers
        self._shardings = shardings
        self._complete: dict[Keys, jax.Array] = {}
        self._stacks: dict[Keys, np.ndarray] = {}
        self._counts: Counter[Keys] = Counter()

    @property
    def tree(self) -> Params:
        """All arrays. Call it after the last parameter."""
        assert not self._stacks, f"layers are missing in {list(self._stacks)}"
        return traverse_util.unflatten_dict(self._complete)

    def add(self, parameter: _Parameter, weight: np.ndarray) -> None:
        """Encodes a parameter. Raises CheckpointError if its format cannot represent it."""
        for name, array in _encode(parameter, weight).items():
            path = (*parameter.module, name)
            if parameter.layer is None:
                self._complete[path] = jax.device_put(array, self._shardings[path])
            else:
                self._stack(path, parameter.layer, array)

    def _stack(self, path: Keys, layer: int, array: np.ndarray) -> None:
        if path not in self._stacks:
            shape = (self._num_layers, *array.shape)
            self._stacks[path] = mapping.aligned(shape, array.dtype)
        self._stacks[path][layer] = array
        self._counts[path] += 1
        if self._counts[path] == self._num_layers:
            stack = self._stacks.pop(path)
            self._complete[path] = jax.device_put(stack, self._shardings[path])


def _encode(parameter: _Parameter, weight: np.ndarray) -> dict[str, np.ndarray]:
    source = parameter.source
    if source.format is None:
        return {source.name: weight}
    try:
        return source.format.encode(weight, source.matrix)
    except CheckpointError as error:
        layer = "" if parameter.layer is None else f" of layer {parameter.layer}"
        raise CheckpointError(f"{_name(*parameter.module)}{layer}: {error}") from error


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor in a checkpoint of a model."""
    model = build_model(spec, Layout("float32", "unroll"))
    targets = {path: parameter.target for path, parameter in _parameters(model).items()}
    destinations = mapping.assign(model.RULES, targets, num_layers=spec.num_layers)
    return {
        name: destination.shape[::-1]
        if destination.transform is mapping.transpose
        else destination.shape
        for name, destination in destinations.items()
    }


def array_specs(spec: ModelSpec, layout: Layout) -> Params:
    """Returns the parameters of `load_params` with an `ArraySpec` in place of each array.

    Every dtype is set. The names of the axes say how a parameter may be cut across devices.
    """
    return _declared(build_model(spec, layout), layout)


def abstract_params(
    spec: ModelSpec, layout: Layout, *, sharding: ShardingOf = on_default_device
) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """Returns the results of `load_params` with a ShapeDtypeStruct in place of each array."""
    model = build_model(spec, layout)
    shapes = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(
            one.shape, jnp.dtype(one.dtype), sharding=sharding(one.names)
        ),
        _declared(model, layout),
    )
    return nnx.split(model)[0], shapes


def _declared(model: CausalLM, layout: Layout) -> Params:
    declared = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree.map(lambda one: replace(one, dtype=one.dtype or layout.dtype), declared)


def _parameters(model: CausalLM) -> dict[str, _Parameter]:
    """Returns every parameter by the path that rules name.

    ``*`` stands for the layer in dense parameters of a loop. Encoded parameters of a loop are
    filled layer by layer, so that few weights are in memory before they are encoded.
    """
    num_layers = model.spec.num_layers
    found = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        source: Source = param.source
        module = cast(Keys, path[:-1])
        shape = tuple(size for _, size in source.matrix.axes)
        target = mapping.Target(shape, source.matrix.num_rows)
        if source.parts is not None:
            axis = [name for name, _ in source.matrix.axes].index(source.parts.axis)
            target = replace(target, parts=source.parts.sizes, parts_axis=axis)
        if model.loop == "unroll" or path[0] != "layers":
            found[_name(*module, source.name)] = _Parameter(target, source, module)
        elif source.format is None or isinstance(source.format, Dense):
            target = replace(target, shape=(num_layers, *shape))
            name = _name("layers", "*", *module[1:], source.name)
            found[name] = _Parameter(target, source, module)
        else:
            for layer in range(num_layers):
                name = _name("layers", layer, *module[1:], source.name)
                found[name] = _Parameter(target, source, module, layer)
    return found


def _name(*path: str | int) -> str:
    return ".".join(map(str, path))


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
