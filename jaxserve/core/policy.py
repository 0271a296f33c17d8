"""Scheduling policies. A policy is one function: the sort key of a request.

The scheduler keeps both the waiting and the running requests sorted by that key. It admits the
first of the waiting requests, and when blocks run out it preempts the last of the running requests.
The key of a request must never change, and no two requests may have equal keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.core.request import Request
from jaxserve.errors import ConfigError

Policy = Callable[[Request], tuple[Any, ...]]
"""Returns the key of a request; the lowest key goes first."""


def fcfs(request: Request) -> tuple[int]:
    """First come, first served. A preempted request goes before all later arrivals."""
    return (request.order,)


def priority(request: Request) -> tuple[int, float, int]:
    """Lowest ``priority`` first; first come, first served among equals."""
    return (request.priority, request.arrival_s, request.order)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def policy_named(name: str) -> Policy:
    """Returns a policy of `POLICIES`. Raises ConfigError if there is none of this name."""
    if name not in POLICIES:
        raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}, got {name!r:.100}")
    return POLICIES[name]
