"""The folder of the sockets: private, locked, and removed with its process."""

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest
import zmq

from jaxserve.errors import ConfigError
from jaxserve.ipc.socket_folder import (
    FOLDER_PREFIX,
    MAX_SOCKET_PATH,
    SocketFolder,
    remove_dead_folders,
)


def test_the_folder_is_private_and_can_be_removed():
    folder = SocketFolder()
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    with open(os.path.join(folder.path, "left-over"), "w"):
        pass
    folder.remove()
    folder.remove()
    assert not os.path.exists(folder.path)


def test_folders_of_dead_fronts_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = SocketFolder()
    dead = SocketFolder()
    os.close(dead._lock)  # as the kernel does when the front ends
    Path(dead.path, "events").touch()
    target = tmp_path / "target"
    target.mkdir()
    others = [tmp_path / name for name in ("other", FOLDER_PREFIX + "link", FOLDER_PREFIX + "file")]
    others[0].mkdir()
    others[1].symlink_to(target)
    others[2].touch()
    new = SocketFolder()
    assert not os.path.exists(dead.path)
    kept = {Path(live.path), Path(new.path), target, *others}
    assert set(tmp_path.iterdir()) == kept
    for folder in (live, new):
        folder.remove()
    assert set(tmp_path.iterdir()) == {target, *others}


def test_folders_of_other_users_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = SocketFolder()
    os.close(dead._lock)
    with monkeypatch.context() as context:
        user = os.geteuid() + 1
        context.setattr(os, "geteuid", lambda: user)
        remove_dead_folders(str(tmp_path))
    assert os.path.exists(dead.path)
    remove_dead_folders(str(tmp_path))
    assert not os.path.exists(dead.path)


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_folder_that_is_removed_before_it_is_locked_is_replaced(tmp_path, monkeypatch, moment):
    """A front that starts at the same time takes it for the folder of a dead one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module, name = (os, "open") if moment == "open" else (fcntl, "flock")
    original, removed = getattr(module, name), []

    def remove_first(*args, **options):
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        return original(*args, **options)

    monkeypatch.setattr(module, name, remove_first)
    folder = SocketFolder()
    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == [Path(folder.path)]
    assert folder.path != str(removed[0])
    folder.remove()


def test_where_folders_cannot_be_locked_none_is_removed(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    first, second = SocketFolder(), SocketFolder()
    assert len(list(tmp_path.iterdir())) == 2
    first.remove()
    second.remove()
    assert not list(tmp_path.iterdir())


def test_no_temporary_folder_is_an_error_of_the_user(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ConfigError, match="TMPDIR"):
        SocketFolder()


def test_addresses_fit_a_socket_if_the_temporary_folder_has_a_long_name(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = SocketFolder()
    for address in (folder.requests(9999), folder.events(9999, 9999)):
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.bind(address)
        assert len(address.removeprefix("ipc://")) <= MAX_SOCKET_PATH
    folder.remove()
    assert list(long.iterdir()) == []


def test_a_folder_that_has_vanished_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = SocketFolder()
    first = folder.path
    folder.renew()
    assert folder.path == first
    os.rmdir(first)
    folder.renew()
    assert list(tmp_path.iterdir()) == [Path(folder.path)]
    remove_dead_folders(str(tmp_path))  # it has a lock
    assert os.path.exists(folder.path)
    os.rmdir(folder.path)
    tmp_path.rmdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        folder.renew()
    tmp_path.mkdir()
    folder.renew()
    assert list(tmp_path.iterdir()) == [Path(folder.path)]
    folder.remove()
    assert not list(tmp_path.iterdir())
