"""Who goes first. A policy is one function that says where a request stands.

The scheduler keeps the waiting and the running requests in the order of that key. It admits from
the front of the waiting ones, and when blocks run out it preempts the last of the running ones. A
key must not change while the request lives, and no two requests may have the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.core.request import Request

Policy = Callable[[Request], tuple[Any, ...]]
"""The key of a request; lower goes first."""


def fcfs(request: Request) -> tuple[int]:
    """First come, first served. A preempted request came before all that still wait."""
    return (request.order,)


def priority(request: Request) -> tuple[int, float, int]:
    """Lower ``priority`` first; first come, first served among equals."""
    return (request.priority, request.arrival_s, request.order)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}
