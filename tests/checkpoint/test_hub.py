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
        self.answer: Exception | list[str] = []
        self.cached = False
        self.download: Exception | None = None
        self.calls: list[dict] = []
        monkeypatch.setattr(hub, "HfApi", lambda: self)
        monkeypatch.setattr(hub, "snapshot_download", self.snapshot_download)

    def model_info(self, model: str, *, timeout: float) -> SimpleNamespace:
        assert 0 < timeout <= 10
        if isinstance(self.answer, Exception):
            raise self.answer
        files = [SimpleNamespace(rfilename=name) for name in self.answer]
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


def test_downloads_only_what_is_needed(fake: Hub) -> None:
    fake.answer = ["config.json", "model.safetensors", "original/consolidated.pth"]
    assert hub.download("a/b") == Path("/downloaded")
    (options,) = fake.calls
    assert options["revision"] == "abc"
    assert options["allow_patterns"] == hub.MODEL_FILES
    assert options["etag_timeout"] == hub.TIMEOUT_S


def test_tokenizer_needs_no_weights(fake: Hub) -> None:
    fake.answer = ["tokenizer.json"]
    assert hub.download("a/b", only_tokenizer=True) == Path("/downloaded")
    assert not any("safetensors" in pattern for pattern in fake.calls[0]["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (OSError("Name or service not known\nmore"), "cannot be reached .OSError: Name or service"),
        (TimeoutError("timed out"), "cannot be reached"),
        (http_error(RepositoryNotFoundError), "no model of that name"),
        (http_error(GatedRepoError), "accept its terms.*hf auth login"),
    ],
)
def test_hub_that_gives_nothing(fake: Hub, error: Exception, complaint: str) -> None:
    fake.answer = error
    with pytest.raises(CheckpointError, match=complaint) as caught:
        hub.download("a/b")
    assert "\n" not in str(caught.value)
    fake.cached = True
    assert hub.download("a/b") == Path("/cache")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["x.gguf", "y.gguf"], "download a GGUF file with `hf download a/b FILE`"),
        (["x.bin"], "choose another model"),
    ],
)
def test_no_safetensors(fake: Hub, files: list[str], complaint: str) -> None:
    fake.answer = files
    with pytest.raises(CheckpointError, match=complaint):
        hub.download("a/b")


def test_download_that_stops(fake: Hub) -> None:
    fake.answer = ["model.safetensors"]
    fake.download = ConnectionError("reset")
    with pytest.raises(CheckpointError, match="stopped: ConnectionError: reset"):
        hub.download("a/b")
