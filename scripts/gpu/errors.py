"""What is said of a result that is off."""

from __future__ import annotations


def beyond(error: float, limit: float) -> str:
    """What to say of an error, which may be NaN."""
    return "" if error < limit else f"relative error {error:.2e}, at most {limit:.1e}"
