"""What can go wrong, by whose fault.

::

    HotswapError
    ├── ConfigError            the config file, a flag or an option is wrong: exit code 2
    │   ├── UnknownComponentError
    │   ├── AmbiguousComponentError
    │   ├── BrokenComponentError       a selected component's import or construction fails
    │   ├── ContractMismatchError
    │   └── ModelLoadError             a checkpoint is missing, damaged or does not fit
    ├── RequestError           one request cannot be served: HTTP 4xx, with the field
    │   ├── ContextLengthError
    │   └── QueueFullError     HTTP 429
    ├── EngineStoppedError     the engine is draining or stopped: HTTP 503
    ├── LoopTimeoutError       its loop has not come to something in time: HTTP 503
    ├── ExchangeError          a part was to be exchanged while serving, and has not been: HTTP 409
    │   └── ExchangeUnderWayError
    ├── ComponentError         a component raised while serving; names kind and component
    └── KVInvariantError       a KV manager's own check failed
"""

from collections.abc import Sequence
from typing import Any


class HotswapError(Exception):
    """Base of all errors that hotswap raises on purpose."""


class ConfigError(HotswapError):
    """``path`` is the config path (``scheduler.policy``); the message says what was given, expected, and what to do."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


class UnknownComponentError(ConfigError):
    """No installed distribution offers a component of that name."""


class AmbiguousComponentError(ConfigError):
    """Two distributions offer the name that was selected."""


class BrokenComponentError(ConfigError):
    """A selected component cannot be imported or built."""


class ContractMismatchError(ConfigError):
    """A selected component was written for another contract version."""


class ModelLoadError(ConfigError):
    """A checkpoint is missing, damaged, or does not have the tensors that its config promises."""


class RequestError(HotswapError):
    """One request cannot be served. ``param`` names the field; ``code`` is OpenAI's error code where it has one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and output do not fit into the model's context."""

    def __init__(self, message: str, param: str | None = "prompt") -> None:
        super().__init__(message, param, "context_length_exceeded")


class QueueFullError(RequestError):
    """The bounded queue is full; try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, None, "queue_full")
        self.retry_after_s = retry_after_s


class EngineStoppedError(HotswapError):
    """The engine does not take requests: it drains, or its loop has ended."""


class LoopTimeoutError(HotswapError):
    """The engine's loop did not get done in time with what it was asked for. ``begun``: it is at it; else it will not
    begin."""

    def __init__(self, message: str, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class ExchangeError(HotswapError):
    """A part could not be exchanged. The old one serves, unless the message says that the loop is still at the
    exchange, that the old one has yet to come back, or that the engine, one of several, has ended. ``reports``: of
    engines that had exchanged theirs."""

    def __init__(self, message: str, reports: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.reports = tuple(reports)


class ExchangeUnderWayError(ExchangeError):
    """Another exchange is under way, and nothing was changed for this one."""


class ComponentError(HotswapError):
    """A component raised while serving."""

    def __init__(self, kind: str, name: str, where: str, cause: BaseException) -> None:
        super().__init__(f"{kind} {name!r} raised in {where}: {type(cause).__name__}: {cause}")
        self.kind = kind
        self.name = name


class KVInvariantError(HotswapError):
    """A page is lost, shared wrongly, or counted wrongly."""
