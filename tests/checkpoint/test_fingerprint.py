"""The fingerprint of the files of a model."""

import os

from jaxserve.checkpoint.fingerprint import fingerprint


def test_it_changes_with_the_files_of_the_model_only(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12345678")
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    (tmp_path / "server.log").write_text("a line")
    (tmp_path / "cache").mkdir()
    assert fingerprint(tmp_path) == before
    os.utime(weights, ns=(1, 1))
    touched = fingerprint(tmp_path)
    assert touched != before
    weights.write_bytes(b"123456789")
    os.utime(weights, ns=(1, 1))
    assert fingerprint(tmp_path) not in (before, touched)


def test_a_model_may_be_one_file(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    before = fingerprint(model)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert fingerprint(model) == before
    model.write_bytes(b"GGUF 2")
    assert fingerprint(model) != before


def test_a_link_that_leads_nowhere_is_part_of_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    (tmp_path / "readme.txt").symlink_to(tmp_path / "missing")
    linked = fingerprint(tmp_path)
    assert linked != before
    (tmp_path / "missing").write_text("a line")
    assert fingerprint(tmp_path) not in (before, linked)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    assert fingerprint(tmp_path)
