"""The facts about a served model: its names, tokenizer, chat template, parsers and limits.

Nothing here runs a request. The adapters in `openai` read these facts; `TextEngine` does the work.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve import __version__
from jaxserve.checkpoint.fingerprint import fingerprint
from jaxserve.checkpoint.locate import find, open_checkpoint, open_tokenizer
from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError, UnknownModelError
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.ipc.messages import Ready
from jaxserve.parsing.registry import (
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)
from jaxserve.sampling_params import check_ids
from jaxserve.text.model_files import unreadable
from jaxserve.text.template_files import ChatTemplates
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a checkpoint that the front process reads: all but the weights.

    Attributes:
      name: the short name of the checkpoint.
      tokenizer: the tokenizer of the checkpoint, or the one that replaces it.
      defaults: the sampling defaults of the checkpoint.
      fingerprint: differs if the files do.
    """

    name: str
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    fingerprint: str = ""

    @classmethod
    def open(cls, config: ModelConfig) -> ModelFiles:
        """Reads the files that ``config.model`` and ``config.tokenizer`` point to.

        Raises:
          CheckpointError: the model does not exist or cannot be read.
          ConfigError: its generation_config.json, or an override of it, is invalid.
        """
        checkpoint = open_checkpoint(config.model)
        tokenizer = (
            checkpoint.tokenizer() if config.tokenizer is None else open_tokenizer(config.tokenizer)
        )
        defaults = GenerationDefaults.from_checkpoint(
            checkpoint.generation_config,
            use_sampling=config.generation_config == "auto",
            overrides=_overrides(config.override_generation_config),
        )
        paths = [checkpoint.path]
        if config.tokenizer is not None:
            paths.append(find(config.tokenizer, only_tokenizer=True))
        try:
            digest = "-".join(map(fingerprint, paths))
        except OSError as error:
            raise unreadable(config.model, error) from error
        return cls(checkpoint.name, tokenizer, defaults, digest)


@dataclass(frozen=True)
class ServedModel:
    """The facts about a model whose engine is ready. Make one with `create`.

    Attributes:
      names: the names under which the model is served, at least one. Replies carry the name that
        was requested, or the first one.
      tokenizer: the tokenizer of the model.
      ready: the sizes that the engine settled on.
      defaults: values for fields that a request does not set.
      chat_templates: the templates that render chats.
      template_variables: variables for the template that a request may override.
      tool_call_parser: the format in which the model writes tool calls; None: no known format.
      reasoning_parser: the format of the model's think blocks; None: it writes none.
      extra_end_ids: IDs of tokens that end a completion, besides the tokenizer's end token.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    ready: Ready
    defaults: GenerationDefaults
    chat_templates: ChatTemplates
    template_variables: Mapping[str, Any]
    tool_call_parser: str | None
    reasoning_parser: str | None
    extra_end_ids: tuple[int, ...]

    @classmethod
    def create(
        cls,
        ready: Ready,
        tokenizer: Tokenizer,
        *,
        names: Sequence[str],
        defaults: GenerationDefaults | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ServedModel:
        """Settles the chat template, the parsers and the end tokens.

        Args:
          ready: what the engine reported when it started.
          tokenizer: the tokenizer of the model.
          names: names under which the model is served, at least one.
          defaults: values for fields that a request does not set; None: no values.
          chat_template: jinja source that replaces all of the tokenizer's own.
          template_variables: variables for the template, for requests that do not set them.
          tool_call_parser: a key of `parsing.registry.TOOL_PARSERS`; "auto": the format that the
            chat template shows; "none": no format.
          reasoning_parser: a key of `parsing.registry.REASONING_PARSERS`, "auto" or "none".

        Raises:
          ConfigError: no parser has this name.
          InvalidRequestError: an end token of the checkpoint is outside the vocabulary.
        """
        defaults = defaults or GenerationDefaults()
        templates = ChatTemplates(chat_template) if chat_template else tokenizer.chat_templates
        of_tools = templates.template_for(with_tools=True) or ""
        extra = sorted({i for i in defaults.eos_token_ids if i != tokenizer.eos_token_id})
        check_ids(extra, ready.vocab_size, param="eos_token_id")
        return cls(
            names=tuple(names),
            tokenizer=tokenizer,
            ready=ready,
            defaults=defaults,
            chat_templates=templates,
            template_variables=dict(template_variables or {}),
            tool_call_parser=_tool_call_format(tool_call_parser, of_tools),
            reasoning_parser=_reasoning_format(
                reasoning_parser, f"{templates.default or ''}{of_tools}"
            ),
            extra_end_ids=tuple(extra),
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the template for chats without tools; None: the model has no template."""
        return self.chat_templates.default

    def template_for(self, *, with_tools: bool) -> str | None:
        """Returns the source of the template for a chat; None: the model has no template."""
        return self.chat_templates.template_for(with_tools=with_tools)

    @property
    def name(self) -> str:
        """The name that replies carry when a request names no model."""
        return self.names[0]

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.ready.vocab_size

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and completion together, that one request can have."""
        return self.ready.max_model_len

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the software and the model in replies."""
        facts = (self.name, self.vocab_size, self.max_model_len)
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()
        return f"jaxserve-{__version__}-{digest}"

    @functools.cached_property
    def hides_think_tags(self) -> bool:
        """Whether the tags of think blocks are special tokens, which decoding leaves out."""
        names = set(map(self.tokenizer.token_text, self.tokenizer.special_ids))
        return not names.isdisjoint(("<think>", "</think>"))

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token, at least 1."""
        return max(1, *map(len, map(self.tokenizer.token_bytes, range(self.tokenizer.vocab_size))))

    def check_name(self, name: str | None) -> None:
        """Raises UnknownModelError unless the model is served as ``name``; None and "" match."""
        if name and name not in self.names:
            raise UnknownModelError(name, self.names)


def _tool_call_format(name: str, template: str) -> str | None:
    """Returns the name of the format, or None. Raises ConfigError for an unknown name."""
    if name == "auto":
        return detect_tool_parser(template)
    if name == "none":
        return None
    tool_parser(name)  # raises ConfigError
    return name


def _reasoning_format(name: str, template: str) -> str | None:
    """Does the same as `_tool_call_format`, for think blocks."""
    if name == "auto":
        return detect_reasoning_parser(template)
    if name == "none":
        return None
    reasoning_parser(name)  # raises ConfigError
    return name


def _overrides(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--override-generation-config must be a JSON object, got {text[:200]!r}"
        ) from error
