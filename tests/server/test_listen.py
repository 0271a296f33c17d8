"""The sockets that a server listens on, and the URL that it announces."""

import contextlib
import errno
import socket
from collections.abc import Iterator

import pytest

from jaxserve.errors import ConfigError
from server import listen as module
from server.listen import is_local, listen, url_of

has_ipv6 = True
try:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
except OSError:
    has_ipv6 = False
needs_ipv6 = pytest.mark.skipif(not has_ipv6, reason="this machine has no IPv6")


@contextlib.contextmanager
def listening(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    listeners = listen(host, port)
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "ipv4", "ipv6", "local", "shown"),
    [
        ("127.0.0.1", True, False, True, "127.0.0.1"),
        ("::1", False, True, True, "[::1]"),
        ("localhost", True, True, True, "localhost"),
        ("", True, True, False, "127.0.0.1"),
        ("0.0.0.0", True, False, False, "127.0.0.1"),
        ("::", True, True, False, "[::1]"),
    ],
)
def test_a_host_stands_for_its_addresses(host, ipv4, ipv6, local, shown) -> None:
    with listening(host) as listeners:
        (port,) = {listener.getsockname()[1] for listener in listeners}
        assert accepts("127.0.0.1", port) == ipv4
        assert accepts("::1", port) == ipv6
        assert is_local(listeners) == local
        assert url_of(listeners, host) == f"http://{shown}:{port}"


@needs_ipv6
def test_a_name_with_only_an_ipv6_address(monkeypatch) -> None:
    def resolve(host, *_, **__):
        assert host == "six.test"
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))] * 2

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listening("six.test") as listeners:
        assert len(listeners) == 1
        assert url_of(listeners, "six.test").startswith("http://[::1]:")


@pytest.mark.parametrize("code", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_family_that_the_machine_does_not_have_is_skipped(monkeypatch, code) -> None:
    bind = module._bind

    def without_ipv6(family, *args, **options):
        if family == socket.AF_INET6:
            raise OSError(code, "no IPv6")
        return bind(family, *args, **options)

    monkeypatch.setattr(module, "_bind", without_ipv6)
    for host in ("localhost", ""):
        with listening(host) as listeners:
            assert [listener.family for listener in listeners] == [socket.AF_INET]
    with pytest.raises(ConfigError, match=r"cannot listen on ::1 port 0: no IPv6"):
        listen("::1", 0)


@needs_ipv6
def test_a_port_that_one_family_has_taken_is_not_half_used() -> None:
    with listening("localhost") as [ipv4, ipv6]:
        port = ipv6.getsockname()[1]
        ipv4.close()  # so it was free for this family
        with pytest.raises(ConfigError, match=rf"::1 port {port}: Address already in use"):
            listen("localhost", port)
        assert not accepts("127.0.0.1", port)


@needs_ipv6
def test_a_free_port_is_free_for_both_families(monkeypatch) -> None:
    """The first ports that the kernel picks for IPv4 are taken for IPv6."""
    bind, num_taken = module._bind, 3

    def bind_or_taken(family, *args, **options):
        nonlocal num_taken
        if family == socket.AF_INET6 and num_taken:
            num_taken -= 1
            raise OSError(errno.EADDRINUSE, "taken")
        return bind(family, *args, **options)

    monkeypatch.setattr(module, "_bind", bind_or_taken)
    with listening("localhost") as listeners:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
        assert len(listeners) == 2
    num_taken = 1000
    with pytest.raises(ConfigError, match="taken"):
        listen("localhost", 0)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 80000, "port 80000"),
        ("127.0.0.1", -1, "port -1"),
        ("no-such-host.invalid", 8000, "no-such-host.invalid"),
        ("192.0.2.1", 0, "192.0.2.1"),
        ("a..b", 0, "a..b"),
        ("a\0b", 0, "port 0"),
    ],
)
def test_what_cannot_be_bound_is_one_sentence(host, port, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        listen(host, port)
    assert "--host" in str(caught.value)
    assert "\n" not in str(caught.value)
