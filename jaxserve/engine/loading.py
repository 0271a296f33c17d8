"""Opens the files of a model and loads its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxserve.checkpoint.checkpoint import Checkpoint
from jaxserve.checkpoint.fingerprint import fingerprint
from jaxserve.checkpoint.locate import open_checkpoint, open_tokenizer
from jaxserve.config import MIB, EngineConfig
from jaxserve.engine.choices import Choices
from jaxserve.engine.memory import MORE_MEMORY, SMALLER_WEIGHTS, explained
from jaxserve.engine.startup import Phase
from jaxserve.ipc.messages import Decision
from jaxserve.models.loading import abstract_params, load_params
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.placement import Placement, bytes_on_each_device
from jaxserve.text.model_files import expand_home
from jaxserve.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedFiles:
    """The files of a model, read but for the weights.

    Attributes:
      fingerprint: of the files of the checkpoint.
      tokenizer: read now, since a grammar must not depend on what happens to the files later.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    fingerprint: str
    tokenizer: Tokenizer


def open_files(config: EngineConfig) -> OpenedFiles:
    """Opens the checkpoint, and reads all of it but the weights.

    Raises:
      CheckpointError: the model is missing, damaged or not supported.
      ConfigError: there is too little memory.
    """
    with explained("opening the checkpoint", MORE_MEMORY):
        checkpoint = open_checkpoint(config.model.model, names_of=gguf_names)
    return OpenedFiles(
        checkpoint=checkpoint,
        fingerprint=fingerprint(checkpoint.path),
        spec=read_spec(checkpoint.config),
        tokenizer=_tokenizer(config, checkpoint),
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    if config.model.tokenizer is not None:
        return open_tokenizer(config.model.tokenizer)
    return checkpoint.tokenizer()


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model: the graph of its modules, its weights, and decisions about them."""

    graphdef: Any
    params: Any
    decisions: list[Decision]


def load(
    cache: str, files: OpenedFiles, chosen: Choices, phase: Callable[[str, str], Phase]
) -> LoadedModel:
    """Loads the weights.

    Args:
      cache: the folder of converted weights; empty: there is none.
      files: the checkpoint.
      chosen: the layout of the weights, and where they go.
      phase: makes a phase with a name and a unit.

    Raises:
      CheckpointError: a weight is missing, unknown or damaged.
      ConfigError: the weights do not fit in memory.
    """
    with (
        explained("loading the weights", SMALLER_WEIGHTS),
        phase("load weights", "bytes") as loading,
    ):
        model = _load_or_restore(cache, files, chosen, loading)
    if chosen.placement.num_devices > 1:
        model.decisions.append(_cut_decision(model.params, chosen.placement))
    return model


def _load_or_restore(cache: str, files: OpenedFiles, chosen: Choices, phase: Phase) -> LoadedModel:
    checkpoint, spec = files.checkpoint, files.spec
    layout, sharding = chosen.layout, chosen.placement.sharding

    def on_bytes(done: int, total: int) -> None:
        phase.update(done, total, f"{done / phase.seconds / 1e9:.2f} GB/s")

    def convert(*decisions: Decision) -> LoadedModel:
        loaded = load_params(checkpoint, spec, layout, sharding=sharding, on_progress=on_bytes)
        return LoadedModel(*loaded, list(decisions))

    if not cache:
        return convert()
    from jaxserve.checkpoint.orbax_cache import WeightsCache, entry_name  # slow to import

    weights_cache = WeightsCache(expand_home(cache))
    # An entry holds whole arrays, for any number of devices.
    name = entry_name(checkpoint, dataclasses.asdict(dataclasses.replace(layout, cut=())))
    graphdef, like = abstract_params(spec, layout, sharding=sharding)
    params = weights_cache.restore(name, like)
    if params is not None:
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        on_bytes(total, total)
        restored = Decision("weights", "restored", f"kept in {cache} by an earlier start")
        return LoadedModel(graphdef, params, [restored])
    model = convert(Decision("weights", "converted", f"not in {cache} yet"))
    weights_cache.save(name, model.params)
    return model


def _cut_decision(params: Any, placement: Placement) -> Decision:
    """Returns the decision about several devices."""
    whole = sum(array.nbytes for array in jax.tree.leaves(params))
    each = bytes_on_each_device(params)
    return Decision(
        "tensor parallel",
        f"{placement.num_devices} devices",
        f"as asked; each holds {each / MIB:.1f} of {whole / MIB:.1f} MiB of weights",
    )
