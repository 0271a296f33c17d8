"""The settings of the server, besides those of its engines. Each field is a flag."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config import MIB, EngineConfig
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.ipc.launch import FACTORY
from jaxserve.openai.prompts import check_variables
from jaxserve.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser,
    tool_parser,
)
from jaxserve.setting import POSITIVE, Range, at_least, between, check_ranges, setting

MAX_FRONTS = 64
"""Each front process takes about 70 MB, and is worth it only if it has a core of its own."""


def _names(parsers: Mapping[str, str]) -> str:
    return f"{', '.join(parsers)}, none, or auto to detect it from the chat template"


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the API: names, access and limits.

    Raises:
      ConfigError: a value is invalid.
    """

    served_model_name: tuple[str, ...] = setting(
        (), "names of the model in the API (default: the name of the checkpoint)"
    )
    api_key: tuple[str, ...] = setting(
        (), "accepted API keys; clients send one as a bearer token (default: no key needed)"
    )
    max_queue: int = setting(
        1024,
        "largest number of completions running or waiting; more requests get a 429",
        range=at_least(1),
    )
    max_body_mib: int = setting(8, "largest request body in MiB", range=at_least(1))
    max_body_memory_mib: int = setting(
        128,
        "MiB that all request bodies in flight may take together, not counting the first 64 KiB of "
        "each; more bodies get a 503",
        range=at_least(1),
    )
    max_json_structure_mib: int = setting(
        3,
        "largest amount of JSON structure in a body, in MiB: numbers, brackets, quotes, escapes, "
        "text, weighted by the time to decode them",
        range=at_least(1),
    )
    body_timeout: float = setting(
        60.0, "seconds within which a request body must arrive", range=POSITIVE
    )
    root_path: str = setting(
        "", "path prefix added by a proxy, such as /llm; requests work with and without it"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origins whose pages may use the API (CORS); * allows all (default: none)"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host names accepted in the Host header, in addition to IP addresses and local names; "
        "* accepts any name (default: no other names if the server listens on loopback without an "
        "API key, else any name)",
    )
    metrics_prefix: str = setting(
        "vllm", "prefix of the metric names; the default fits existing dashboards for vLLM"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.max_body_memory_mib < self.max_body_mib:
            raise ConfigError(
                f"--max-body-memory-mib must be at least --max-body-mib, {self.max_body_mib}, "
                f"got {self.max_body_memory_mib}"
            )
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ConfigError(
                f"--root-path must start with / and must not end with /, got {self.root_path!r}"
            )
        if not all(self.api_key):
            raise ConfigError("--api-key must not be empty")

    def share(self, num_fronts: int) -> ApiSettings:
        """Returns the settings of each of several fronts, which divide the memory of bodies."""
        memory_mib = max(self.max_body_memory_mib // num_fronts, self.max_body_mib)
        return dataclasses.replace(self, max_body_memory_mib=memory_mib)

    @property
    def max_body_bytes(self) -> int:
        """Size limit of a request body, in bytes."""
        return self.max_body_mib * MIB

    @property
    def max_json_structure_bytes(self) -> int:
        """Limit of `jaxserve.openai.json_structure.JsonStructure.size` of a body, in bytes."""
        return self.max_json_structure_mib * MIB


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the process and of the chat format.

    Raises:
      ConfigError: a value is invalid.
    """

    host: str = setting(
        "127.0.0.1",
        "address or name to listen on; localhost is 127.0.0.1 and ::1, 0.0.0.0 all IPv4 networks, "
        "'' and :: all networks",
    )
    port: int = setting(8000, "port to listen on; 0 picks a free one", range=between(0, 65535))
    api_server_count: int = setting(
        1,
        "processes that serve HTTP, chat templates and text, each on a core of its own; with more "
        "than 1 a main process accepts the connections, and restarts those processes if they die",
        range=between(1, MAX_FRONTS),
    )
    chat_template: str | None = setting(
        None, "file with a Jinja chat template (default: the template of the model)"
    )
    default_chat_template_kwargs: str = setting(
        "", "JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'"
    )
    tool_call_parser: str = setting(
        "auto", f"format of the model's tool calls: {_names(TOOL_PARSERS)}"
    )
    reasoning_parser: str = setting(
        "auto", f"format of the model's reasoning: {_names(REASONING_PARSERS)}"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "lowest severity that is logged"
    )
    log_stats_interval: float = setting(
        10.0, "seconds between throughput lines in the log; 0 turns them off", range=at_least(0)
    )
    shutdown_timeout: float = setting(
        5.0,
        "seconds that requests in flight may take to finish after SIGTERM, SIGHUP or SIGINT; a "
        "second SIGINT ends them at once, SIGQUIT gives them unlimited time",
        range=Range("at least 0", 0, has_infinity=True),
    )
    keep_running: bool = setting(
        False,
        "keep serving errors when no engine is left and its restarts are used up; without this "
        "flag the process ends with code 1, so that a service manager can act",
    )
    keep_alive_timeout: int = setting(
        75, "seconds after which an idle connection is closed", range=at_least(0)
    )
    write_timeout: float = setting(
        60.0,
        "seconds after which a client that has stopped reading is disconnected",
        range=POSITIVE,
    )
    engine_factory: str = setting(
        FACTORY, "module:function that builds an engine, for tests and extensions"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        # Check here, so that errors show before a model is loaded.
        if self.tool_call_parser not in ("auto", "none"):
            tool_parser(self.tool_call_parser)
        if self.reasoning_parser not in ("auto", "none"):
            reasoning_parser(self.reasoning_parser)
        _ = self.template_variables

    @property
    def template_variables(self) -> dict[str, Any]:
        """The decoded ``default_chat_template_kwargs``. Raises ConfigError."""
        text = self.default_chat_template_kwargs
        try:
            variables = dict(json.loads(text or "{}"))
            check_variables(variables)
        except (TypeError, ValueError, InvalidRequestError) as error:
            raise ConfigError(
                "--default-chat-template-kwargs must be a JSON object of template variables that "
                f"the server does not set itself, got {text[:200]!r}"
            ) from error
        return variables


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """All that a front needs to know, in whatever process it runs.

    Attributes:
      config: the settings of the engines.
      api: the settings of the API.
      server: the settings of the server.
      chat_template: the text of ``--chat-template``; None: the template of the model.
      is_local: whether only this machine can reach the server.
      created: Unix time of the start of the server, in seconds.
    """

    config: EngineConfig
    api: ApiSettings
    server: ServerSettings
    chat_template: str | None
    is_local: bool
    created: int
