"""Finds the chat templates of a model in its files, by the rules of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text.model_files import read_text

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of templates that are used. Models may have others, such as "rag"."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The chat templates of a model, as jinja sources.

    Attributes:
      default: renders every chat, or those without tools; None: the model has no template.
      tool_use: renders chats with tools; None: ``default`` does.
    """

    default: str | None = None
    tool_use: str | None = None

    def template_for(self, *, with_tools: bool) -> str | None:
        """Returns the template for a chat."""
        return self.tool_use if with_tools and self.tool_use is not None else self.default

    @classmethod
    def of(cls, named: Mapping[str, Any], place: str) -> ChatTemplates:
        """Returns those of several named templates that are used.

        The template for tools renders every chat if it is the only one.

        Raises:
          CheckpointError: one of them is not a string.
        """
        for name in (DEFAULT, TOOL_USE):
            template = named.get(name)
            if template is not None and not isinstance(template, str):
                raise CheckpointError(
                    f"the chat template in {place} must be a string, got {template!r:.100}"
                )
        default, tool_use = named.get(DEFAULT), named.get(TOOL_USE)
        return cls(tool_use if default is None else default, tool_use)


def read_chat_templates(
    folder: Path, config: Mapping[str, Any], old_file: Mapping[str, Any]
) -> ChatTemplates:
    """Reads the chat templates in a folder.

    The files chat_template.jinja and additional_chat_templates/NAME.jinja come first, then the
    configuration of the tokenizer, then chat_template.json.

    Args:
      folder: the folder of the model.
      config: the contents of tokenizer_config.json.
      old_file: the contents of chat_template.json.

    Raises:
      CheckpointError: a template cannot be read.
    """
    paths = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        paths[DEFAULT] = folder / "chat_template.jinja"
    files = {name: _read(paths[name]) for name in (DEFAULT, TOOL_USE) if name in paths}
    if DEFAULT in files:
        return ChatTemplates.of(files, str(folder))
    given = config.get("chat_template") or old_file.get("chat_template")
    if isinstance(given, list):  # several templates, each with a name
        named = {str(e.get("name")): e.get("template") for e in given if isinstance(e, dict)}
    else:
        named = given if isinstance(given, dict) else {DEFAULT: given}
    return ChatTemplates.of({**named, **files}, str(folder))


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error
