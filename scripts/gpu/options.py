"""How the parts of the check are run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

# Where, in the folder of the check, the compiler describes the steps that it compiles.
DUMP = "xla"


@dataclass(frozen=True)
class Options:
    """What every part is told.

    Attributes:
      tiny: toy sizes, to try the check itself out on a CPU; the kernels are interpreted there.
      folder: where to leave files.
      facts: figures of the parts before this one.
    """

    tiny: bool
    folder: Path
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """Whose shapes to measure, of `models.CONFIGS`."""
        return ("tiny",) if self.tiny else ("llama-3.1-8b", "smollm2-135m")

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of requests to measure with."""
        return (1, 4) if self.tiny else (1, 8, 64, 256)

    def fact(self, name: str) -> float:
        """A figure of a part before this one; NaN if that did not come so far."""
        return self.facts.get(name, math.nan)
