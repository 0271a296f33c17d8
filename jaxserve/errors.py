"""Errors whose messages are written for users: the fault, the expected value and the actual one.

Broken invariants of jaxserve itself are assertions, never these errors.
"""


class JaxserveError(Exception):
    """Base class of the errors that are reported to users."""


class ConfigError(JaxserveError):
    """A setting is invalid in general, for this model, or on this device."""


class CheckpointError(JaxserveError):
    """A checkpoint is missing, incomplete or damaged, or does not match its configuration."""


class UnsupportedModelError(CheckpointError):
    """The architecture, or a variant of it, is not supported."""


class InvalidRequestError(JaxserveError):
    """A request is invalid.

    Attributes:
      message: the same as ``str(error)``.
      param: name of the invalid field in the HTTP API, or None if the error is not in one field.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt with its completion, is longer than the context."""


class UnknownModelError(JaxserveError):
    """A request names a model that is not served; the message lists the ``served`` models."""

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(
            f"The model `{name[:200]}` does not exist. Models served here: {', '.join(served)}"
        )


class RequestFailedError(JaxserveError):
    """The engine failed on a request that it had accepted."""


class UnavailableError(JaxserveError):
    """The server starts or shuts down, or has aborted a request that has no partial reply."""


class EngineDeadError(JaxserveError):
    """The engine process of a request has exited."""


class QueueFullError(JaxserveError):
    """The server is at its admission limit; the client can try again later."""
