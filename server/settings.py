"""What a server can be told, beyond what its engines can."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config import MIB, setting
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.ipc.launch import FACTORY
from jaxserve.openai.prompts import check_variables
from jaxserve.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser,
    tool_parser,
)


def _names(parsers: Mapping[str, str]) -> str:
    return f"{', '.join(parsers)}, none, or auto for what the chat template shows"


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the API answers, and to whom."""

    served_model_name: tuple[str, ...] = setting(
        (), "names of the model in the API; unset: the checkpoint's own name"
    )
    api_key: tuple[str, ...] = setting(
        (), "keys of which a client must send one as a bearer token; unset: none is needed"
    )
    max_queue: int = setting(
        1024, "answers in flight, running or waiting, beyond which requests are refused with 429"
    )
    max_body_mib: int = setting(8, "largest request body in MiB")
    body_timeout: float = setting(60.0, "seconds in which the body of a request must have come")
    root_path: str = setting(
        "", "path under which a proxy shows the server, such as /llm; works with it and without"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origins whose pages may use the API (CORS), * for all; unset: none"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names under which the server may be asked, besides addresses and local names, * for any; "
        "unset: none if it listens to this machine only and needs no key, else any",
    )
    metrics_prefix: str = setting(
        "vllm", "first part of the names of the metrics; the default fits existing dashboards"
    )

    def __post_init__(self) -> None:
        for flag, value in {"max-queue": self.max_queue, "max-body-mib": self.max_body_mib}.items():
            if value < 1:
                raise ConfigError(f"--{flag} must be at least 1, got {value}")
        if self.body_timeout <= 0:
            raise ConfigError(f"--body-timeout must be more than 0, got {self.body_timeout}")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ConfigError(
                f"--root-path must begin with / and not end with it, got {self.root_path!r}"
            )
        if not all(self.api_key):
            raise ConfigError("--api-key must not be empty")

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request."""
        return self.max_body_mib * MIB


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens and how it runs."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every network")
    port: int = setting(8000, "port to listen on; 0 for any that is free")
    chat_template: str | None = setting(
        None, "file with a jinja chat template; unset: the model's own"
    )
    default_chat_template_kwargs: str = setting(
        "", "JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'"
    )
    tool_call_parser: str = setting(
        "auto", f"form of the model's tool calls: {_names(TOOL_PARSERS)}"
    )
    reasoning_parser: str = setting(
        "auto", f"form of the model's think blocks: {_names(REASONING_PARSERS)}"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least important messages to show"
    )
    log_stats_interval: float = setting(10.0, "seconds between throughput lines; 0: none")
    shutdown_timeout: float = setting(
        5.0, "seconds that requests in flight get to finish when the server is told to stop"
    )
    keep_alive_timeout: int = setting(75, "seconds after which an idle connection is closed")
    engine_factory: str = setting(
        FACTORY, "module:function that builds an engine; for tests and extensions"
    )

    def __post_init__(self) -> None:
        # Here, so that it is found before a model is loaded.
        if self.tool_call_parser not in ("auto", "none"):
            tool_parser(self.tool_call_parser)
        if self.reasoning_parser not in ("auto", "none"):
            reasoning_parser(self.reasoning_parser)
        _ = self.template_variables

    @property
    def template_variables(self) -> dict[str, Any]:
        """``default_chat_template_kwargs``, read. Raises ConfigError."""
        text = self.default_chat_template_kwargs
        try:
            variables = dict(json.loads(text or "{}"))
            check_variables(variables)
        except (TypeError, ValueError, InvalidRequestError) as error:
            raise ConfigError(
                "--default-chat-template-kwargs must be a JSON object of variables that the "
                f"template has for itself, got {text[:200]!r}"
            ) from error
        return variables
