"""Every class of errors has a status, and all errors have the same form of body."""

import pytest

from jaxserve import errors
from jaxserve.openai.errors import error_reply


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (errors.InvalidRequestError("m", param="n"), 400, "n", 400),
        (errors.ContextLengthError("m", param="prompt"), 400, "prompt", "context_length_exceeded"),
        (errors.QueueFullError("m"), 429, None, "queue_full"),
        (errors.EngineDeadError("m"), 503, None, 503),
        (errors.RequestFailedError("m"), 500, None, 500),
    ],
)
def test_known_errors_keep_their_message(error, status, param, code) -> None:
    reply = error_reply(error)
    info = reply.body.error
    assert (reply.status, info.message, info.param, info.code) == (status, "m", param, code)


def test_an_unknown_model_error_lists_the_known_models() -> None:
    reply = error_reply(errors.UnknownModelError("x" * 1000, ("one", "two")))
    info = reply.body.error
    assert (reply.status, info.param, info.code) == (404, "model", "model_not_found")
    assert info.message.endswith("Models served here: one, two")
    assert len(info.message) < 300


def test_unexpected_errors_reveal_no_details() -> None:
    reply = error_reply(ValueError("secret at 0x7f00"))
    assert reply.status == 500
    assert "secret" not in reply.body.error.message


def test_messages_have_no_addresses_and_a_length_limit() -> None:
    message = error_reply(
        errors.InvalidRequestError("<x at 0x7f1234abcd> " + "y" * 9999)
    ).body.error
    assert "0x" not in message.message
    assert len(message.message) <= 2000
