"""N-gram drafts in plain Python, as a reference for the proposer on the device."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.runner.ngram import LONGEST_MATCH, SHORTEST_MATCH


def propose(tokens: Sequence[int], count: int) -> list[int]:
    """Returns ``count`` drafts, or none without a match; see `jaxserve.runner.ngram.propose`."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        end = list(tokens[-length:])
        for stop in range(len(tokens) - 1, length - 1, -1):
            if len(end) == length and list(tokens[stop - length : stop]) == end:
                drafts = list(tokens)
                for _ in range(count):
                    drafts.append(drafts[stop + len(drafts) - len(tokens)])
                return drafts[len(tokens) :]
    return []
