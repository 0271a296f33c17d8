"""The sockets that a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxserve.errors import ConfigError

Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]

LOCALHOST = "localhost"

LOOPBACK: list[Address] = [
    (socket.AF_INET, ("127.0.0.1", 0)),
    (socket.AF_INET6, ("::1", 0, 0, 0)),
]
"""The addresses of localhost (RFC 6761, 6.3). Clients try both, whatever /etc/hosts lists."""

NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of an address whose family this machine does not have."""

BACKLOG = 2048

FREE_PORT_TRIES = 20
"""Ports that are tried until one is free for all addresses."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen on every address of a host, all on one port.

    Args:
      host: an IP address; a name, for all its addresses; "" for all addresses of this machine.
        ``::`` stands for those of IPv4 as well. Addresses of a family that this machine does not
        have are skipped if there are others.
      port: 0 picks a port that is free on all addresses.

    Raises:
      ConfigError: an address cannot be bound, or the host has none.
    """
    try:
        addresses = _addresses(host)
    except (OSError, ValueError) as error:
        raise _cannot_listen(host, port, error) from error
    tries_left = FREE_PORT_TRIES if port == 0 and len(addresses) > 1 else 1
    while True:
        tries_left -= 1
        try:
            return _bind_all(addresses, port)
        except ConfigError:
            if not tries_left:
                raise


def is_local(listeners: Sequence[socket.socket]) -> bool:
    """Returns True if only this machine can reach the sockets."""
    return all(
        ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
        for listener in listeners
    )


def url_of(listeners: Sequence[socket.socket], host: str = "") -> str:
    """Returns the URL of a server, without a path. ``host``: the argument of `listen`."""
    address, port = listeners[0].getsockname()[:2]
    if host == LOCALHOST:
        address = LOCALHOST
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _addresses(host: str) -> list[Address]:
    if host == LOCALHOST:
        return LOOPBACK
    infos = socket.getaddrinfo(
        host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )  # not the port: the C library cuts large numbers
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


def _bind_all(addresses: Sequence[Address], port: int) -> list[socket.socket]:
    """Returns a socket for each address. With port 0, the first one picks it for all."""
    # Otherwise "::" would also take the IPv4 addresses, which have a socket of their own.
    only_ipv6 = any(family == socket.AF_INET for family, _ in addresses)
    listeners: list[socket.socket] = []
    missing: ConfigError | None = None
    for family, address in addresses:
        number = port or (listeners[0].getsockname()[1] if listeners else 0)
        try:
            listeners.append(_bind(family, address, number, only_ipv6=only_ipv6))
        except (OSError, OverflowError) as error:
            failure = _cannot_listen(address[0], port, error)
            if getattr(error, "errno", None) not in NO_FAMILY:
                for listener in listeners:
                    listener.close()
                raise failure from error
            missing = failure
    if missing is not None and not listeners:
        raise missing
    return listeners


def _bind(
    family: socket.AddressFamily, address: tuple[Any, ...], port: int, *, only_ipv6: bool
) -> socket.socket:
    """Returns a non-blocking socket that listens. Raises OSError or OverflowError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        listener.bind((address[0], port, *address[2:]))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
    )
