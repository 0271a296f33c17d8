"""Where the layers of a model keep their keys and values in the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8
"""Each group costs block tables in every step."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Groups of layers with the same window.

    The cache has as many layers as the largest group, and every group uses all of them: a block
    holds keys and values of the layers of one group. A request has a block table for each group,
    so it can give back the blocks of a windowed group that no query sees any more.

    Attributes:
      windows: for each group, the number of latest positions that a query sees, its own included;
        None: all.
      num_layers: the layers of the cache.
      places: for each layer of the model, its group, and its layer of the cache in
        [0, ``num_layers``).
    """

    windows: tuple[int | None, ...]
    num_layers: int
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def of(windows: Sequence[int | None]) -> CacheLayout:
        """Returns the layout for layers with these windows.

        All groups have the size of the smallest set of layers with the same window. Larger sets
        become several groups, the last of which may leave layers of the cache unused. If these are
        more than `MAX_GROUPS`, all layers form one group, which keeps what any of them may see.
        """
        counts = Counter(windows)
        size = min(counts.values())
        num_groups = {window: -(-count // size) for window, count in counts.items()}
        if sum(num_groups.values()) > MAX_GROUPS:
            widest = None if None in windows else max(w for w in windows if w is not None)
            return CacheLayout((widest,), len(windows), tuple((0, i) for i in range(len(windows))))
        groups = [window for window, count in num_groups.items() for _ in range(count)]
        seen: Counter[int | None] = Counter()
        places: list[tuple[int, int]] = []
        for window in windows:
            group, layer = divmod(seen[window], size)
            places.append((groups.index(window) + group, layer))
            seen[window] += 1
        return CacheLayout(tuple(groups), size, tuple(places))
