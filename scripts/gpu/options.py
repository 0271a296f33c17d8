"""The options of the parts of the check."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

DUMP = "xla"
"""The subfolder of the check's folder that the compiler dumps its steps to."""


@dataclass(frozen=True)
class Options:
    """The options of every part.

    Attributes:
      tiny: toy sizes, to test the check itself on a CPU, where the kernels are interpreted.
      folder: the folder for the results.
      facts: figures of earlier parts, by name.
    """

    tiny: bool
    folder: Path
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """The models of `models.CONFIGS` whose shapes are measured."""
        return ("tiny",) if self.tiny else ("llama-3.1-8b", "smollm2-135m")

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes, in requests, that are measured."""
        return (1, 4) if self.tiny else (1, 8, 64, 256)

    def fact(self, name: str) -> float:
        """Returns a figure of an earlier part; NaN if that part did not report it."""
        return self.facts.get(name, math.nan)
