"""N-gram drafts in plain Python, as a reference for the proposer on the device."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH, SHORTEST_MATCH = 4, 2


def propose(tokens: Sequence[int], count: int) -> list[int]:
    """Returns ``count`` drafts, or none without a match; see `jaxserve.runner.ngram.propose`."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        end = list(tokens[-length:])
        for stop in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[stop - length : stop]) == end:
                extended = list(tokens)
                for place in range(stop, stop + count):
                    extended.append(extended[place])
                return extended[len(tokens) :]
    return []
