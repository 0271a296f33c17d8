"""Errors that a user can cause. Each says what is wrong, what was expected and what was given.

Broken invariants of our own are assertions, never one of these.
"""


class JaxserveError(Exception):
    """Base class of every error that a user can cause."""


class ConfigError(JaxserveError):
    """A setting is impossible: on its own, for this model, or on this device."""


class CheckpointError(JaxserveError):
    """A checkpoint is missing, incomplete, damaged, or not of the model that it claims to be."""


class UnsupportedModelError(CheckpointError):
    """The architecture, or a variant of it, is not one that jaxserve implements."""


class InvalidRequestError(JaxserveError):
    """A request cannot be served as asked.

    ``param`` is the name of the field to blame (as in the HTTP API), or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(InvalidRequestError):
    """A prompt, or prompt and answer together, are longer than the context."""


class UnknownModelError(JaxserveError):
    """The request names a model that is not one of those ``served`` here."""

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(
            f"The model `{name[:200]}` does not exist. Models served here: {', '.join(served)}"
        )


class RequestFailedError(JaxserveError):
    """The engine could not go on with a request that it had accepted."""


class EngineDeadError(JaxserveError):
    """The engine process that was serving a request is gone."""


class QueueFullError(JaxserveError):
    """The server has as many requests as it will hold; try again later."""
