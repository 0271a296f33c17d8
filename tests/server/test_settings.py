"""Invalid settings are rejected before a model is loaded."""

import pytest

from jaxserve.errors import ConfigError
from server.settings import ApiSettings, ServerSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_call_parser", "nope"),
        ("reasoning_parser", "nope"),
        ("default_chat_template_kwargs", "{"),
        ("default_chat_template_kwargs", "[1]"),
        ("default_chat_template_kwargs", '{"messages": []}'),
        ("api_server_count", 0),
        ("api_server_count", 65),
        ("shutdown_timeout", -1.0),
        ("shutdown_timeout", float("nan")),
    ],
)
def test_rejects_invalid_server_settings(field, value) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_queue", 0), ("max_body_mib", 0), ("body_timeout", 0), ("api_key", ("",))],
)
def test_rejects_invalid_api_settings(field, value) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        ApiSettings(**{field: value})


def test_template_variables_are_parsed() -> None:
    settings = ServerSettings(default_chat_template_kwargs='{"enable_thinking": false}')
    assert settings.template_variables == {"enable_thinking": False}
    assert ServerSettings().template_variables == {}
