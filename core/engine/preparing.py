"""What an engine's ranks prepare for an exchange, beside the steps: a rank that hangs holds up nobody for good."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from hotswap.core.errors import EngineStoppedError, ExchangeError, ExchangeUnderWayError
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.parallel import Executor, WorkerInfo

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
"""How long an exchange waits for the ranks to build the new parts and load their weights."""
LET_GO_TIMEOUT_S = 10.0
"""How long one that has failed waits for them to let go what they have prepared."""


class Preparing:
    """Of one ``executor``. ``engine`` begins what the log says. Used by one exchange at a time.

    The executor is asked on threads of their own, one after the other, which may be left behind: what a rank that hangs
    has prepared stays there, and until it is gone nothing else is prepared.
    """

    def __init__(self, executor: Executor, engine: str = "") -> None:
        self._executor, self._engine = executor, engine
        self._letting_go: threading.Thread | None = None

    def check_free(self) -> None:
        """ExchangeUnderWayError while ranks have yet to let go what they prepared for an exchange that has failed."""
        if self._letting_go is not None and self._letting_go.is_alive():
            raise ExchangeUnderWayError(
                "the ranks have yet to let go what they prepared for an exchange that has failed; try again later")

    def load(self, parts: Mapping[str, Component]) -> WorkerInfo:
        """As :meth:`Executor.prepare`; ExchangeError where it takes longer than ``LOAD_TIMEOUT_S``. What comes too late
        is let go."""
        answer = Future[WorkerInfo]()
        loading = _start("hotswap-prepare", self._load, parts, answer)
        try:
            loading.join(LOAD_TIMEOUT_S)
            if loading.is_alive():
                raise ExchangeError(
                    f"the ranks have not prepared the new parts within {LOAD_TIMEOUT_S:g} s; the old ones serve on")
        except BaseException:
            self.let_go(loading)
            raise
        try:
            return answer.result()
        finally:
            del answer  # which an exception that it holds would hold in turn

    def let_go(self, loading: threading.Thread | None = None) -> None:
        """What was prepared, and will not be put in place; once ``loading`` has ended, which prepares it."""
        thread = self._letting_go = _start("hotswap-let-go", self._prepare_nothing, loading)
        thread.join(LET_GO_TIMEOUT_S)
        if thread.is_alive():
            logger.error(
                "%sthe exchange has failed, and the ranks have not let go within %g s what they had prepared for it; "
                "until they have, no part of theirs is exchanged", self._engine, LET_GO_TIMEOUT_S)
        else:
            self._letting_go = None

    # on threads of their own

    def _load(self, parts: Mapping[str, Component], answer: Future[WorkerInfo]) -> None:
        try:
            answer.set_result(self._executor.prepare(parts))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            del answer  # see above

    def _prepare_nothing(self, loading: threading.Thread | None) -> None:
        if loading is not None:
            loading.join()
        try:
            self._executor.prepare({})
        except EngineStoppedError:
            pass  # and all that was prepared with it
        except Exception:
            logger.exception("%s raised when it was to let go what it had prepared", self._executor.label)


def _start(name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
