"""The IDs of requests in messages: two readers of an engine may use the same ID."""

from __future__ import annotations

from collections.abc import Iterable

SEPARATOR = ":"


def wire_id(reader: int, request_id: str) -> str:
    """Returns the ID on the wire of a request of ``reader``: that of reader 0 stays as it is."""
    return f"{reader}{SEPARATOR}{request_id}" if reader else request_id


def split(wire: str) -> tuple[int, str]:
    """Returns the reader of a request, and the ID that the reader knows; see `wire_id`.

    Only for engines that have, or have had, several readers: reader 0 has no requests there.
    """
    reader, separator, request_id = wire.partition(SEPARATOR)
    return (int(reader), request_id) if separator and reader.isdecimal() else (0, wire)


def own_ids(reader: int, wires: Iterable[str]) -> frozenset[str]:
    """Returns the IDs of those requests that are from ``reader``, as the reader knows them."""
    if reader == 0:
        return frozenset(wires)
    return frozenset(own for of, own in map(split, wires) if of == reader)
