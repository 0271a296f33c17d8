"""Messages about wrong results."""

from __future__ import annotations


def accuracy_problem(error: float, limit: float) -> str:
    """Returns a message if ``error`` is not below ``limit`` (or is NaN), else an empty string."""
    return "" if error < limit else f"relative error must be below {limit:.1e}, got {error:.2e}"
