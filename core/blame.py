"""Whose exception it was: components call one another, and a message should name the one in whose code it arose."""

from types import TracebackType

from hotswap.core.errors import ComponentError
from hotswap.core.interfaces.component import Component


def blame(error: BaseException, called: Component | None = None, method: str = "") -> str:
    """What went wrong and in which component: the innermost in the traceback, be it the queue policy below a scheduler
    or the eviction policy below a KV manager; else ``called``, where core knows it called one; else the error alone.
    """
    if isinstance(error, ComponentError):
        return str(error)
    message = f"{type(error).__name__}: {error}"
    if called is not None:
        message = str(ComponentError(called.kind, called.name, method, error))
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        caller = trace.tb_frame.f_locals.get("self")
        if isinstance(caller, Component):
            message = str(ComponentError(caller.kind, caller.name, trace.tb_frame.f_code.co_name, error))
        trace = trace.tb_next
    return message
