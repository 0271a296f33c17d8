"""Files that must load or be rejected."""

import tracemalloc

import pytest

from jaxserve.errors import CheckpointError, UnsupportedModelError

REJECTIONS = (CheckpointError, UnsupportedModelError)
MAX_MESSAGE_CHARS = 1000
MAX_MEMORY_BYTES = 64 << 20


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder for files that each example of a test overwrites."""
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="session")
def rejection():
    """``rejection(load)``: the message with which ``load`` rejects a file, or None.

    Checks that the message is short and that memory stays small.
    """

    def rejection(load):
        tracemalloc.start()
        try:
            load()
            message = None
        except REJECTIONS as error:
            message = str(error)
            assert len(message) < MAX_MESSAGE_CHARS, message[:200]
            assert "\n" not in message
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < MAX_MEMORY_BYTES
        return message

    return rejection
