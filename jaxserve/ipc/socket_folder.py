"""The folder with the sockets between the engines and their readers."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "jaxserve-f-"
"""The beginning of the names of socket folders. It is short, as the path of a socket must be."""

MAX_SOCKET_PATH = 107
"""The most bytes in the path of a Unix socket (``sun_path`` without its final zero)."""


class SocketFolder:
    """A new folder for the sockets of one server, private to its user (mode 0700).

    It is in the temporary folder, or in /tmp if the paths of the sockets would be too long there.
    The process that made the folder locks it as long as it lives. So a folder without a lock was
    left by one that was killed, and a new one removes it. Programs that clean the temporary folder,
    such as systemd-tmpfiles, leave a locked folder alone.

    Raises:
      ConfigError: no temporary folder can be written to.
    """

    def __init__(self) -> None:
        self._lock: int | None
        self.path, self._lock = _new_folder()
        remove_dead_folders(os.path.dirname(self.path))

    def renew(self) -> None:
        """Makes another folder, with a new path, if this one has vanished.

        Sockets that are connected stay so.

        Raises:
          ConfigError: see `SocketFolder`.
        """
        assert self._lock is not None, "the folder was removed"
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._lock)):
                return
        logger.warning("the folder of the sockets, %s, has vanished; making another", self.path)
        vanished = self._lock
        self.path, self._lock = _new_folder()
        os.close(vanished)

    def events(self, process: int, reader: int = 0) -> str:
        """The address that a reader binds and an engine process connects to."""
        return f"ipc://{self.path}/out-{process}-{reader}"

    def requests(self, process: int) -> str:
        """The address that an engine process binds and its readers connect to."""
        return f"ipc://{self.path}/in-{process}"

    def remove(self) -> None:
        """Removes the folder and its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)  # releases the lock
            self._lock = None


def remove_socket(address: str) -> None:
    """Removes the file of a socket that a killed process has left behind, if there is one."""
    with contextlib.suppress(OSError):  # what is left goes with the folder
        os.unlink(address.removeprefix("ipc://"))


def remove_dead_folders(parent: str) -> None:
    """Removes the socket folders in ``parent`` that this user's fronts have left when they died."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(FOLDER_PREFIX):
                with contextlib.suppress(OSError):  # another front removes it, or it has a lock
                    _remove_if_dead(entry.path)


def _new_folder() -> tuple[str, int]:
    """Does the same as `_make_locked_folder` in the temporary folder. Raises ConfigError."""
    try:
        parent = tempfile.gettempdir()
        longest = os.path.join(parent, FOLDER_PREFIX + 8 * "x", "out-9999-9999")
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
            parent = "/tmp"
        return _make_locked_folder(parent)
    except OSError as error:
        raise ConfigError(
            f"the sockets of the engines need a temporary folder: {error}; set TMPDIR to a folder "
            "that can be written to"
        ) from error


def _make_locked_folder(parent: str) -> tuple[str, int]:
    """Returns the path of a new folder, and the descriptor that holds its lock. Raises OSError."""
    while True:
        path = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent)
        # Another front may remove the folder before it is locked; then the next one is tried.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        # Some network file systems cannot lock a folder. There no folder is ever taken for dead.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return path, descriptor
        os.close(descriptor)


def _remove_if_dead(path: str) -> None:
    """Removes a socket folder unless it belongs to another user or is locked. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)  # under the lock: see `_make_locked_folder`
    finally:
        os.close(descriptor)
