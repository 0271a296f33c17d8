"""Downloads from the hub: files, cache and errors."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from jaxserve.checkpoint import hub
from jaxserve.errors import CheckpointError


def http_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)


class Hub:
    """A fake of the hub and its cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listing: Exception | list[str] = []
        self.cached = False
        self.download: Exception | None = None
        self.calls: list[dict] = []
        monkeypatch.setattr(hub, "HfApi", lambda: self)
        monkeypatch.setattr(hub, "snapshot_download", self.snapshot_download)

    def model_info(self, model: str, *, timeout: float) -> SimpleNamespace:
        assert 0 < timeout <= 10
        if isinstance(self.listing, Exception):
            raise self.listing
        files = [SimpleNamespace(rfilename=name) for name in self.listing]
        return SimpleNamespace(sha="abc", siblings=files)

    def snapshot_download(self, model: str, **options) -> str:
        self.calls.append(options)
        if options.get("local_files_only"):
            if not self.cached:
                raise LocalEntryNotFoundError("not in the cache")
            return "/cache"
        if self.download:
            raise self.download
        return "/downloaded"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def test_downloads_only_model_files_of_one_revision(fake: Hub) -> None:
    fake.listing = ["config.json", "model.safetensors", "original/consolidated.pth"]
    assert hub.download("a/b") == Path("/downloaded")
    (options,) = fake.calls
    assert options["revision"] == "abc"
    assert options["allow_patterns"] == hub.MODEL_FILES
    assert options["etag_timeout"] == hub.TIMEOUT_S


def test_downloads_no_weights_for_a_tokenizer(fake: Hub) -> None:
    fake.listing = ["tokenizer.json"]
    assert hub.download("a/b", only_tokenizer=True) == Path("/downloaded")
    assert not any("safetensors" in pattern for pattern in fake.calls[0]["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Name or service not known\nmore"), "cannot be reached .OSError: Name or service"),
        (TimeoutError("timed out"), "cannot be reached"),
        (http_error(RepositoryNotFoundError), "no model of that name"),
        (http_error(GatedRepoError), "accept its terms.*hf auth login"),
    ],
)
def test_a_failing_hub_is_an_error_unless_the_model_is_cached(
    fake: Hub, error: Exception, message: str
) -> None:
    fake.listing = error
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.download("a/b")
    assert "\n" not in str(caught.value)
    fake.cached = True
    assert hub.download("a/b") == Path("/cache")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["x.gguf", "y.gguf"], "download a GGUF file with `hf download a/b FILE`"),
        (["x.bin"], "choose another model"),
    ],
)
def test_rejects_a_model_without_safetensors(fake: Hub, files: list[str], message: str) -> None:
    fake.listing = files
    with pytest.raises(CheckpointError, match=message):
        hub.download("a/b")


def test_a_download_that_breaks_off_is_an_error(fake: Hub) -> None:
    fake.listing = ["model.safetensors"]
    fake.download = ConnectionError("reset")
    with pytest.raises(CheckpointError, match="stopped: ConnectionError: reset"):
        hub.download("a/b")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError(30, "Read-only file system"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_folder_that_takes_no_download_is_named(fake: Hub, monkeypatch, error: OSError) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", "/home/me/hub")
    fake.listing = ["model.safetensors"]
    fake.download = error
    with pytest.raises(CheckpointError) as caught:
        hub.download("a/b")
    assert str(caught.value) == (
        f"cannot download a/b to /home/me/hub: {error.strerror}; set HF_HOME to a folder with "
        "space that can be written to"
    )


def test_an_unreadable_cache_is_an_error(fake: Hub, monkeypatch) -> None:
    fake.listing = TimeoutError("timed out")

    def snapshot_download(model: str, **options) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="cannot read the downloaded files of a/b: Perm"):
        hub.download("a/b")


def test_without_a_home_folder_nothing_is_downloaded(fake: Hub, monkeypatch) -> None:
    """PUB-02: a random user ID has neither HOME nor an entry in passwd."""

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(CheckpointError, match="no home folder to download it to: set HF_HOME"):
        hub.download("a/b")
    assert not fake.calls
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", "/hub")
    fake.listing = ["model.safetensors"]
    assert hub.download("a/b") == Path("/downloaded")
