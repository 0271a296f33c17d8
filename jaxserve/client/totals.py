"""The totals of an engine over its restarts."""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from jaxserve.ipc.messages import StepStats

TOTALS = tuple(
    name for name in StepStats.__struct_fields__ if name.startswith(("total_", "prefix_"))
)
"""The counts of `StepStats` that only grow, besides ``accepted_per_position``."""


def latest(a: StepStats, b: StepStats) -> StepStats:
    """Returns ``a`` with the larger of each total: a reader may know a later state than another."""
    totals = {name: max(getattr(a, name), getattr(b, name)) for name in TOTALS}
    accepted = zip_longest(a.accepted_per_position, b.accepted_per_position, fillvalue=0)
    return msgspec.structs.replace(a, **totals, accepted_per_position=tuple(map(max, accepted)))


def continued(before: StepStats, now: StepStats) -> StepStats:
    """Returns the state ``now`` with totals that continue those of ``before``.

    Args:
      before: the last state of the engine before a restart.
      now: a state of the engine after it, with totals that started at 0.
    """
    totals = {name: getattr(before, name) + getattr(now, name) for name in TOTALS}
    accepted = zip_longest(before.accepted_per_position, now.accepted_per_position, fillvalue=0)
    return msgspec.structs.replace(now, **totals, accepted_per_position=tuple(map(sum, accepted)))
