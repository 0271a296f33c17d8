"""Flags are derived from the fields of the config groups."""

import argparse
import dataclasses
import typing

import pytest

from jaxserve import cli
from jaxserve.config import CompileConfig, EngineConfig, ModelConfig
from jaxserve.setting import at_least, setting


def parse(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    cli.add_engine_flags(parser)
    return cli.read_engine_config(parser.parse_args(argv))


def test_no_flags_give_the_default_config() -> None:
    assert parse() == EngineConfig()


def test_every_field_of_every_group_has_a_flag_and_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    cli.add_engine_flags(parser)
    text = parser.format_help()
    names = []
    for group in typing.get_type_hints(EngineConfig).values():
        for field in dataclasses.fields(group):
            assert "--" + field.name.replace("_", "-") in text
            assert field.metadata["help"]
            names.append(field.name)
    # A name in two groups would give one flag two meanings.
    assert len(names) == len(set(names))


def test_values_have_the_types_of_the_fields() -> None:
    config = parse(
        "--model", "/m", "--max-model-len", "100", "--memory-fraction", "0.5", "--dtype", "float32"
    )
    assert config.model == ModelConfig(model="/m", max_model_len=100, dtype="float32")
    assert config.cache.memory_fraction == 0.5


def test_a_flag_may_have_a_short_name() -> None:
    assert parse("-tp", "4") == parse("--tensor-parallel-size", "4")
    assert parse("-tp", "4").parallel.tensor_parallel_size == 4


def test_booleans_can_be_turned_off() -> None:
    assert parse("--no-warmup").compile == CompileConfig(warmup=False)
    assert parse("--warmup").compile == CompileConfig()
    assert not parse("--no-async-scheduling").scheduler.async_scheduling


@pytest.mark.parametrize(
    "argv",
    [("--dtype", "int3"), ("--max-model-len", "many"), ("--no-such-flag",), ("--block-size",)],
)
def test_bad_flags_end_the_program_with_a_usage_line(argv, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class ExampleGroup:
    """A group for the test.

    With a second paragraph, which is not shown.
    """

    names: tuple[str, ...] = setting((), "some names")
    percent: str = setting("50%", "part of it, as 50%%")
    limit: int | None = setting(None, "a limit (default: none)", range=at_least(1))
    size: int = setting(5, "a size", range=at_least(2, "a pair"))


def test_adds_the_flags_of_a_group() -> None:
    parser = argparse.ArgumentParser()
    cli.add_flags(parser, ExampleGroup)
    text = parser.format_help()
    assert "A group for the test:" in text
    assert "second paragraph" not in text
    assert "(default: 50%)" in text
    assert "a limit (default: none); at least 1\n" in text
    assert "a size; at least 2 (a pair) (default: 5)" in text
    args = parser.parse_args(["--names", "a", "b", "--limit", "3"])
    assert tuple(cli.read_flags(args, ExampleGroup).names) == ("a", "b")
    assert cli.read_flags(args, ExampleGroup).limit == 3


def test_skipped_fields_keep_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    cli.add_flags(parser, ExampleGroup, skip=("limit",))
    assert "--limit" not in parser.format_help()
    assert cli.read_flags(parser.parse_args([]), ExampleGroup) == ExampleGroup()
