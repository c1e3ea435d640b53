"""The processes of one executor's ranks, and the channels to them: started together, ended together."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from hotswap.core.engine.clock import Clock, SystemClock
from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.execution.channel import Channel, ChannelClosedError, Frame, Kind, Listener, decode
from hotswap.core.interfaces.parallel import Launcher
from hotswap.plugins.parallel.rank import Failure, Refusal

logger = logging.getLogger(__name__)

_POLL_S = 0.1
"""How often somebody who waits for a rank looks whether all are alive."""

_LAST_WORDS_S = 1.0
"""When a rank has failed or hung up, another may be the cause: it is about to say so, or its process to end."""


class Crew:
    """``size`` ranks. What a rank answers to :meth:`ask` is waited for; ``on_news`` gets the verdicts that come of
    themselves, on a thread of the crew's; ``on_end`` is told once, and on any thread, that a rank is gone and why.

    Whoever connects and does not know ``secret`` is hung up on; so is a second one that claims the same rank.
    """

    def __init__(
        self, launcher: Launcher, size: int, secret: bytes, on_news: Callable[[Frame], None],
        on_end: Callable[[str], None], clock: Clock | None = None,
    ) -> None:
        self._launcher, self._size, self._secret = launcher, size, secret
        self._on_news, self._on_end, self._clock = on_news, on_end, clock or SystemClock()
        self._channels: dict[int, Channel] = {}
        self._answers: list[SimpleQueue[Frame]] = [SimpleQueue() for _ in range(size)]
        self._prepared: list[SimpleQueue[Frame]] = [SimpleQueue() for _ in range(size)]
        """Answers that take their time, beside those to what is asked meanwhile."""
        self._refusals: SimpleQueue[Refusal] = SimpleQueue()
        self._told: set[int] = set()
        """Ranks that said themselves why they end."""
        self._silent: set[int] = set()
        """Ranks of whom nothing more will be heard: all that they said has been read."""
        self._lock, self._over = Lock(), Event()
        """``_over`` is set when ``problem`` is."""
        self._listener: Listener | None = None
        self.scratch: Path | None = None
        """A directory of mode 0700 for what the ranks of one machine share; None where they are on several."""
        self.problem: str | None = None
        """Why a rank is gone, or "stopped"."""
        self.short_of_memory = False
        """That is why."""

    def listen(self) -> str:
        """The address that ranks must report to."""
        host = self._launcher.host()
        if host is None:
            self.scratch = Path(tempfile.mkdtemp(prefix="hotswap-"))
            self._listener = Listener(self._secret, path=self.scratch / "ranks")
        else:
            self._listener = Listener(self._secret, host=host)
        Thread(target=self._accept, args=(self._listener,), name="hotswap-accept", daemon=True).start()
        return self._listener.address

    def start(self, entry: str, arguments: Sequence[dict[str, Any]], timeout_s: float) -> list[Frame]:
        """Start the ranks and wait until each is READY. ConfigError as a rank raised it; EngineStoppedError."""
        self._launcher.start(entry, arguments)
        try:
            return self._await(Kind.READY, timeout_s, watch=True)
        except EngineStoppedError:
            self._raise_refusal(_LAST_WORDS_S)
            raise
        finally:
            self._hang_up_listener()

    def send(self, kind: Kind, payload: bytes, rank: int) -> None:
        """EngineStoppedError where a rank is gone."""
        try:
            if self.problem is None:
                self._channels[rank].send(kind, payload)
        except ChannelClosedError as error:
            self.fail(self._cause(rank, f"is gone: {error}"))
        if self.problem is not None:
            raise EngineStoppedError(self.problem)

    def ask(self, kind: Kind, payload: bytes, answer: Kind) -> list[Frame]:
        """Each rank's answer. ConfigError as a rank raised it; EngineStoppedError where a rank is gone, or goes."""
        try:
            for rank in range(self._size):
                self.send(kind, payload, rank)
            return self._await(answer)
        except EngineStoppedError:
            self._raise_refusal(0.0)
            raise

    def stop(self, timeout_s: float) -> None:
        """Within about ``timeout_s`` all have ended, be they many and none of them willing."""
        end = self._clock.now() + timeout_s
        with self._lock:
            self.problem = self.problem or "stopped"
            channels = list(self._channels.values())
        self._over.set()
        for channel in channels:
            with contextlib.suppress(OSError):  # gone already, or closed by an earlier call
                # Who reads nothing must not keep the others from being told.
                channel.set_timeout(max(0.0, end - self._clock.now()))
                channel.send(Kind.STOP)
        self._hang_up_listener()
        self._launcher.stop(max(0.0, end - self._clock.now()))
        for channel in channels:
            channel.close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _raise_refusal(self, wait_s: float) -> None:
        with contextlib.suppress(Empty):
            refusal = self._refusals.get(timeout=wait_s)
            raise ConfigError(refusal.message, refusal.path) from None

    def _await(self, kind: Kind, timeout_s: float | None = None, watch: bool = False) -> list[Frame]:
        """``watch``: a process may end before it has reported, so that no channel tells of it."""
        frames, begun = [], self._clock.now()
        for answers in self._prepared if kind is Kind.PREPARED else self._answers:
            while True:
                with contextlib.suppress(Empty):
                    frame = answers.get(timeout=_POLL_S)
                    break
                if watch and (ended := self._ended()):
                    rank = min(ended)
                    self.fail(f"rank {rank} {ended[rank]} before it was ready; what it wrote above says why")
                if self.problem is not None:
                    raise EngineStoppedError(self.problem)
                if timeout_s is not None and self._clock.now() - begun > timeout_s:
                    raise EngineStoppedError(f"not every rank was ready within {timeout_s:g} s")
            if frame.kind is not kind:
                raise EngineStoppedError(f"a rank answered {frame.kind.name} where {kind.name} was due")
            frames.append(frame)
        return frames

    def _accept(self, listener: Listener) -> None:
        while self.problem is None:
            try:
                connection = listener.accept(_POLL_S)
            except TimeoutError:
                continue
            except OSError:
                return  # everybody is here, or nobody will come any more
            Thread(target=self._admit, args=(listener, connection), name="hotswap-admit", daemon=True).start()

    def _admit(self, listener: Listener, connection: Any) -> None:
        try:
            channel, rank = listener.admit(connection)
        except ChannelClosedError as error:
            logger.warning("somebody who is no rank of ours connected to %s: %s", listener.address, error)
            return
        with self._lock:
            known = rank in self._channels or rank >= self._size or self.problem is not None
            if not known:
                self._channels[rank] = channel
        if known:
            logger.warning("a second rank %d, or one too many, was hung up on", rank)
            channel.close()
            return
        self._listen(rank, channel)

    def _listen(self, rank: int, channel: Channel) -> None:
        """What one rank says, until it ends."""
        try:
            while True:
                frame = channel.receive()
                if frame.kind in (Kind.VERDICT, Kind.TRANSFERS):
                    self._on_news(frame)
                elif frame.kind is Kind.REFUSED:
                    self._told.add(rank)
                    refusal = decode(Refusal, frame.payload)
                    self._refusals.put(refusal)
                    self.fail(f"rank {rank} refuses the config: {refusal.message}", told=True)
                elif frame.kind is Kind.FAILED:
                    self._told.add(rank)
                    failure = decode(Failure, frame.payload)
                    problem = f"has failed: {failure.message}"
                    cause = self._cause(rank, problem) if failure.lost else f"rank {rank} {problem}"
                    self.fail(cause, memory=failure.memory)
                else:
                    answers = self._prepared if frame.kind is Kind.PREPARED else self._answers
                    answers[rank].put(frame)
        except ChannelClosedError as error:
            self._silent.add(rank)
            self.fail(self._cause(rank, f"is gone: {error}"))

    def _ended(self) -> dict[int, str]:
        """The processes that have ended and did not say why; what one has said may be still to be read."""
        return {
            rank: end for rank, end in self._launcher.ended().items()
            if rank not in self._told and (rank in self._silent or rank not in self._channels)}

    def _cause(self, rank: int, problem: str) -> str:
        """What is wrong, where ``rank`` has lost its connection to others or to us: a process that has ended without a
        word is why, be it another's; else ``problem``. Sockets close a moment before the system says how one ended."""
        for _ in range(int(_LAST_WORDS_S / _POLL_S)):
            ended = self._ended()
            if ended:
                cause = rank if rank in ended else min(ended)
                logger.debug("rank %d %s", rank, problem)
                return f"rank {cause} {ended[cause]}"
            if self._over.wait(_POLL_S):
                break
        return f"rank {rank} {problem}"

    def fail(self, problem: str, told: bool = False, memory: bool = False) -> None:
        """A rank is gone, or another that it cannot do without. The first reason counts. ``told``: whoever asked the
        rank will be told, and tell it."""
        with self._lock:
            if self.problem is not None:
                logger.debug("%s", problem)
                return
            self.problem, self.short_of_memory = problem, memory
        self._over.set()
        logger.log(logging.DEBUG if told else logging.ERROR, "%s", problem)
        self._on_end(problem)

    def _hang_up_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
