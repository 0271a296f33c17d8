"""The vectors of prompts, as users see them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def unit(vector: Sequence[float]) -> list[float]:
    """Returns the vector scaled to length 1; zeros stay zeros."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]
