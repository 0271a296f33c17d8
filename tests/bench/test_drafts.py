"""The benchmark that compares a server with drafts and one without, on fake engines."""

import itertools
import json

from jaxserve.bench.__main__ import main
from jaxserve.bench.drafts import TEXTS, accepted_tokens, prompt
from jaxserve.bench.server_process import ServerProcess

FAKE = ["--engine-factory", "jaxserve.testing.fake_engine:build"]


def test_both_servers_get_the_same_requests(
    front_checkpoint, tmp_path, capsys, monkeypatch
) -> None:
    """The tokens of a fake model are a hash, so hardly any draft is accepted."""
    ticks = itertools.count()
    monkeypatch.setattr(ServerProcess, "cpu_seconds", lambda self: next(ticks))
    output = tmp_path / "figures.json"
    flags = ["--model", str(front_checkpoint), "--concurrent", "1", "3", "--repeats", "2"]
    flags += ["--output-len", "20", "--output", str(output), "--", *FAKE]
    assert main(["drafts", *flags]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["text"], row["num_requests"]) for row in rows] == [
        (text, number) for text in TEXTS for number in (1, 3)
    ]
    for row in rows:
        assert 1 <= row["tokens_per_step"] < 1.5
        assert all(len(figures) == 2 for figures in row["pairs"].values())
    assert "| repetitive | 3 |" in capsys.readouterr().out


def test_reads_the_counter_of_accepted_drafts() -> None:
    page = (
        "# TYPE vllm:spec_decode_num_accepted_tokens_total counter\n"
        'vllm:spec_decode_num_accepted_tokens_total{model_name="a",engine="0"} 12\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9\n'
    )
    assert accepted_tokens(page) == 12


def test_prompts_differ_by_seed_only() -> None:
    for text in TEXTS:
        assert prompt(text, 1) == prompt(text, 1) != prompt(text, 2)
