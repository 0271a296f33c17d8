"""Derives command line flags from the fields of the config groups."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any, TypeVar

from jaxserve.config import EngineConfig

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser, group: type, *, skip: tuple[str, ...] = ()) -> None:
    """Adds ``--field-name`` for each field of a dataclass that `jaxserve.setting.setting` declares.

    A boolean becomes ``--x / --no-x``, and a Literal accepts its values. A tuple accepts several
    values after the flag and can be repeated. Fields named in ``skip`` get no flag. A flag also has
    the alias of its setting.
    """
    types_of = typing.get_type_hints(group)
    heading = (group.__doc__ or "").splitlines()[0].removesuffix(".")
    section = parser.add_argument_group(heading)
    for field in dataclasses.fields(group):
        if field.name in skip:
            continue
        names = ["--" + field.name.replace("_", "-"), field.metadata["alias"]]
        section.add_argument(
            *filter(None, names),
            dest=field.name,
            # The action "extend" cannot append to a tuple.
            default=None if field.default == () else field.default,
            help=_help(field),
            **_argparse_keywords(types_of[field.name]),
        )


def read_flags(args: argparse.Namespace, group: type[T]) -> T:
    """Builds a dataclass from the parsed flags. Fields without a flag keep their defaults."""
    values = {}
    for field in dataclasses.fields(group):  # type: ignore
        value = getattr(args, field.name, None)
        if hasattr(args, field.name):
            is_several = field.default == () or isinstance(value, list)
            values[field.name] = tuple(value or ()) if is_several else value
    return group(**values)


def add_engine_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Adds the flags of every group of `EngineConfig`."""
    for field_type in typing.get_type_hints(EngineConfig).values():
        add_flags(parser, field_type, skip=skip)


def read_engine_config(args: argparse.Namespace) -> EngineConfig:
    """Builds the `EngineConfig` from the parsed flags."""
    hints = typing.get_type_hints(EngineConfig)
    return EngineConfig(**{name: read_flags(args, group) for name, group in hints.items()})


def _argparse_keywords(hint: Any) -> dict[str, Any]:
    """Returns the argparse keywords for a field of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _argparse_keywords(next(a for a in inner if a is not type(None)))
    if origin is typing.Literal:
        return {"choices": inner}
    if origin is tuple:
        return {
            "action": "extend",
            "type": inner[0],
            "nargs": "+",
            "metavar": inner[0].__name__.upper(),
        }
    return {"type": hint, "metavar": hint.__name__.upper()}


def _help(field: dataclasses.Field[Any]) -> str:
    """Returns the help of a flag: the text of the setting, its range and its default."""
    allowed, default = field.metadata["range"], field.default
    text = field.metadata["help"] + (f"; {allowed.text}" if allowed else "")
    return text + ("" if default in (None, (), "") else f" (default: {default})".replace("%", "%%"))
