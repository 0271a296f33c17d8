"""Decides how many draft tokens a step verifies for each request.

A step is compiled for a few numbers of rows, and a draft is one more row. A step with more rows
takes longer, and has room for more drafts, each of which is accepted with some probability. The
number of rows is the one with the most expected tokens a second. While few requests run, drafts
nearly always pay. On a busy engine, or for a text that cannot be predicted, they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DECAY = 0.8
"""The factor of the past in each step with drafts: about the last five of them count."""

_RECOVERY = 1 / 64
"""In each step without drafts, an estimate goes this fraction of the way back to its first value,
so that a request whose drafts were rejected tries again after some tens of steps."""

_FIRST_ACCEPTED, _FIRST_REJECTED = 2.0, 1.0
"""The drafts that a new request is taken to have had."""


class DraftRecord:
    """Estimates whether drafts of one request are accepted.

    Attributes:
      probability: the estimated probability, in (0, 1), that a draft is accepted if those before it
        were.
    """

    __slots__ = ("_accepted", "_rejected", "probability")

    def __init__(self) -> None:
        self._accepted = _FIRST_ACCEPTED
        self._rejected = _FIRST_REJECTED
        self._estimate()

    def add(self, num_planned: int, num_accepted: int) -> None:
        """Counts the result of a step with drafts. A draft that was not proposed is a rejection."""
        assert 0 <= num_accepted <= num_planned >= 1
        self._accepted = _DECAY * self._accepted + num_accepted
        self._rejected = _DECAY * self._rejected + (num_accepted < num_planned)
        self._estimate()

    def skip(self) -> None:
        """Counts a step without drafts."""
        self._accepted += _RECOVERY * (_FIRST_ACCEPTED - self._accepted)
        self._rejected += _RECOVERY * (_FIRST_REJECTED - self._rejected)
        self._estimate()

    def _estimate(self) -> None:
        # Without a rejection among the last steps, the estimate must still be below 1.
        rejected = max(self._rejected, 0.05)
        self.probability = self._accepted / (self._accepted + rejected)


@dataclass(frozen=True, slots=True)
class Speculation:
    """The settings of an engine that speculates.

    Attributes:
      max_drafts: the most draft tokens of a request in one step, at least 1.
      step_costs: numbers of rows, ascending, and the time that a decode step of so many rows takes,
        in any unit. The last number is the most rows of a step.
    """

    max_drafts: int
    step_costs: tuple[tuple[int, float], ...]

    @property
    def max_num_rows(self) -> int:
        """The most rows of a step."""
        return self.step_costs[-1][0]

    def num_drafts(
        self, records: Sequence[DraftRecord], *, num_rows: int, most: int
    ) -> Sequence[int]:
        """Returns how many drafts each request gets in the next step.

        Args:
          records: of the requests that may have drafts.
          num_rows: rows of the step without drafts, at least ``len(records)``.
          most: the most drafts that the step may have.
        """
        sizes = [(rows, cost) for rows, cost in self.step_costs if rows >= num_rows]
        if most < 1 or not records or not sizes:
            return [0] * len(records)
        # The j-th draft of a request is accepted with probability p ** j. A later draft never comes
        # before an earlier one of the same request.
        gains = sorted(
            (
                (record.probability**j, -j, index)
                for index, record in enumerate(records)
                for j in range(1, self.max_drafts + 1)
            ),
            reverse=True,
        )[:most]
        # Each size has room for the drafts with the largest gains. `tokens` is what it gives.
        count = taken = 0
        tokens, best_rate = float(num_rows), 0.0
        for rows, cost in sizes:
            end = min(rows - num_rows, len(gains))
            tokens += sum(gain for gain, _, _ in gains[taken:end])
            taken = end
            if tokens / cost > best_rate:
                count, best_rate = end, tokens / cost
        counts = [0] * len(records)
        for _, _, index in gains[:count]:
            counts[index] += 1
        return counts


def non_decreasing(costs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Removes noise from measured `Speculation.step_costs`: fewer rows never take longer."""
    cheapest = float("inf")
    smooth: list[tuple[int, float]] = []
    for rows, cost in reversed(costs):
        cheapest = min(cheapest, cost)
        smooth.append((rows, cheapest))
    return tuple(reversed(smooth))


def assumed_costs(max_num_rows: int) -> tuple[tuple[int, float], ...]:
    """Returns `Speculation.step_costs` for an engine that has not measured its steps.

    They assume that 16 rows take as long as reading the weights.
    """
    sizes = [2**i for i in range(1, max_num_rows.bit_length()) if 2**i < max_num_rows]
    return tuple((rows, 16.0 + rows) for rows in [*sizes, max_num_rows])
