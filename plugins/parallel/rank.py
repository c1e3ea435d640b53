"""The process of one rank: reports to its executor, builds its worker, carries out what it is told."""

import contextlib
import logging
import os
import re
import shutil
from collections import deque
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # exported without saying so

from hotswap.core.blame import blame
from hotswap.core.errors import ConfigError
from hotswap.core.execution.channel import Channel, ChannelClosedError, Frame, Kind, connect, decode, encode
from hotswap.core.execution.child import call
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.messages import StepMessage
from hotswap.core.interfaces.parallel import RankPlan, Take, Worker, WorkerFactory, WorkerInfo
from hotswap.core.registry import Registry
from hotswap.plugins.parallel.mesh import DistributedMesh

logger = logging.getLogger(__name__)

ENTRY = f"{__name__}:serve"


@dataclass(frozen=True)
class Job:
    """What a rank is told when it starts. ``secret``: hexadecimal. ``store``: where the ranks meet. ``plan``: of all
    that meet there, of which this is number ``position``; ``rank`` counts those of its engine. ``scratch``: a directory
    of the executor's that goes with it. ``local_rank``, ``local_size``: see ``Launcher``."""

    rank: int
    address: str
    secret: str
    store: str
    scratch: str | None
    plan: RankPlan
    entry: str
    arguments: dict[str, Any]
    device: str
    timeout_s: float
    log_level: int
    position: int = 0
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class Ready:
    """A rank's worker is loaded. ``hears``: it must be told what was kept. ``sharers``: ranks that share the memory
    which ``info`` says is free."""

    info: WorkerInfo
    hears: bool
    sharers: int


@dataclass(frozen=True)
class Prepared:
    """Parts for an exchange are loaded, or ``problem`` says why not; ``path``: the config key of what is refused, None
    where something has failed."""

    ready: Ready | None
    problem: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Exchange:
    """See ``Executor.exchange``."""

    plan: CachePlan
    keeps_pages: bool
    take: Take


@dataclass(frozen=True)
class Exchanged:
    """``problem``: why the rank could not; it does nothing before it is told to go back. ``memory``: there was not
    enough of it."""

    problem: str | None = None
    memory: bool = False


@dataclass(frozen=True)
class Refusal:
    """A ConfigError that arose on a rank."""

    message: str
    path: str


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank. ``lost``: in a collective, which says of itself no more than that it lost others.
    ``memory``: there was not enough of it."""

    message: str
    lost: bool
    memory: bool


def serve(arguments: dict[str, Any]) -> None:
    """The life of a rank. ``arguments``: a :class:`Job`, as JSON."""
    job = decode(Job, encode(arguments))
    logging.basicConfig(
        level=job.log_level, format=f"%(asctime)s %(levelname)s rank {job.rank} %(name)s: %(message)s")
    try:
        channel = connect(job.address, bytes.fromhex(job.secret), job.rank)
    except ChannelClosedError as error:
        _clear(job.scratch)
        raise SystemExit(f"rank {job.rank}: nobody waits for it any more: {error}") from error
    frames: SimpleQueue[Frame] = SimpleQueue()
    Thread(target=_listen, args=(channel, frames, job.scratch), daemon=True).start()
    try:
        worker, mesh = _build(job)
        ready = Ready(
            worker.info(), hears=not mesh.is_last, sharers=1 if mesh.device.startswith("cuda") else job.local_size)
        channel.send(Kind.READY, encode(ready))
        _work(worker, channel, frames, ready, answers=mesh.is_last and mesh.leads)
        worker.close()
    except ConfigError as error:
        channel.send(Kind.REFUSED, encode(Refusal(error.message, error.path)))
    except Exception as error:
        failure = Failure(_short(blame(error)), lost=_in_collective(error), memory=isinstance(error, MemoryError))
        logger.log(logging.DEBUG if failure.lost else logging.ERROR, "rank %d has failed", job.rank, exc_info=True)
        channel.send(Kind.FAILED, encode(failure))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _in_collective(error: BaseException) -> bool:
    """Whether ``error`` arose in torch.distributed."""
    while error.__cause__ is not None:
        error = error.__cause__
    trace, module = error.__traceback__, ""
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module == dist.__name__ or module.startswith(f"{dist.__name__}.")


def _short(message: str) -> str:
    """The first line, without the place in a library's source that it begins with."""
    return re.sub(r"\[\S+:\d+\] ", "", next(iter(message.splitlines()), ""))


def _listen(channel: Channel, frames: "SimpleQueue[Frame]", scratch: str | None) -> None:
    """What the executor says, in order. When it has gone, this process ends, whatever it is in the middle of."""
    try:
        while True:
            frame = channel.receive()
            frames.put(frame)
            if frame.kind is Kind.STOP:
                return
    except ChannelClosedError:
        _clear(scratch)
        os._exit(1)


def _clear(scratch: str | None) -> None:
    """The executor has gone, perhaps by force: its directory goes, too."""
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def _build(job: Job) -> tuple[Worker, DistributedMesh]:
    device, backend = _device(job), "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
        backend = "nccl"
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // job.local_size))
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(
        backend, store=_store(job), rank=job.position, world_size=job.plan.world_size, timeout=timeout)
    mesh = DistributedMesh(job.plan, job.position, device, timeout)
    factory: WorkerFactory = call(job.entry, job.arguments)
    return factory(job.plan, job.rank, mesh), mesh


def _store(job: Job) -> Any:
    kind, _, place = job.store.partition(":")
    if kind == "file":
        return FileStore(place, job.plan.world_size)
    host, _, port = place.rpartition(":")
    return TCPStore(host, int(port), is_master=False)


def _device(job: Job) -> str:
    """Each rank of a machine has a CUDA device of its own."""
    kind, _, index = job.device.partition(":")
    if kind != "cuda":
        return job.device
    if index and job.plan.world_size > 1:
        raise ConfigError(
            f"{job.device!r} is one device, but there are {job.plan.world_size} ranks; write 'cuda', and choose "
            "devices with CUDA_VISIBLE_DEVICES", "device")
    # On one machine the engines of a deployment lie side by side; on a cluster the launcher says what a rank may use.
    place = job.local_rank + (job.plan.replica.first_rank if job.scratch is not None else 0)
    if place >= torch.cuda.device_count():
        raise ConfigError(
            f"{place + 1} ranks need as many CUDA devices on their machine, which has "
            f"{torch.cuda.device_count()}; shard over fewer ranks", "parallel")
    return job.device if index else f"cuda:{place}"


def _work(worker: Worker, channel: Channel, frames: "SimpleQueue[Frame]", ready: Ready, answers: bool) -> None:
    """Carry out frames until one says STOP. ``answers``: the verdicts of this rank are those that count."""
    held: deque[Frame] = deque()
    while (frame := next_frame(frames, held)).kind is not Kind.STOP:
        if frame.kind is Kind.EXECUTE:
            verdict = worker.execute(decode(StepMessage, frame.payload))
            if answers:
                channel.send(Kind.VERDICT, encode(verdict))
            elif verdict.finished_transfers:  # of its own pages, of which nobody else can tell
                channel.send(Kind.TRANSFERS, encode(verdict.finished_transfers))
        elif frame.kind is Kind.JOIN:
            worker.join()
        elif frame.kind is Kind.ALLOCATE:
            worker.allocate(decode(CachePlan, frame.payload))
            channel.send(Kind.DONE)
        elif frame.kind is Kind.REPORT:
            channel.send(Kind.REPORTED, encode(worker.report()))
        elif frame.kind is Kind.PREPARE:
            refs = decode(dict[str, dict[str, Any]], frame.payload)
            Thread(target=_prepare, args=(worker, channel, refs, ready), name="hotswap-prepare", daemon=True).start()
        elif frame.kind is Kind.EXCHANGE:
            channel.send(Kind.EXCHANGED, encode(_exchange(worker, decode(Exchange, frame.payload))))
        elif frame.kind is Kind.SETTLE:
            worker.settle()
            channel.send(Kind.DONE)
        else:
            raise ChannelClosedError(f"the executor sent {frame.kind.name}, which no rank expects")


def _prepare(worker: Worker, channel: Channel, refs: dict[str, dict[str, Any]], ready: Ready) -> None:
    """Beside the steps. Whatever is wrong with a new part is answered, and ends nothing."""
    registry = Registry()
    try:
        parts = {kind: registry.build(kind, ComponentRef(**ref), kind) for kind, ref in refs.items()}
        answer = Prepared(replace(ready, info=worker.prepare(parts)))
    except ConfigError as error:
        answer = Prepared(None, error.message, error.path)
    except Exception as error:
        logger.exception("the new parts could not be loaded")
        answer = Prepared(None, blame(error))
    with contextlib.suppress(ChannelClosedError):  # the engine has ended meanwhile
        channel.send(Kind.PREPARED, encode(answer))


def _exchange(worker: Worker, told: Exchange) -> Exchanged:
    try:
        worker.exchange(told.plan, told.keeps_pages, told.take)
    except Exception as error:
        logger.exception("the exchange has failed")
        return Exchanged(blame(error), isinstance(error, MemoryError))
    return Exchanged()


def next_frame(frames: "SimpleQueue[Frame]", held: deque[Frame]) -> Frame:
    """The next frame, behind those that are ``held``. Where a step of another engine is to be joined, and one of our
    own has come meanwhile, ours runs in its place, and the join in ours: both are one turn of everybody's."""
    frame = held.popleft() if held else frames.get()
    if frame.kind is Kind.JOIN:
        with contextlib.suppress(Empty):
            while True:
                held.append(frames.get_nowait())
        for place, other in enumerate(held):
            if other.kind is Kind.EXECUTE:
                held[place] = frame
                return other
    return frame


def job_arguments(job: Job) -> dict[str, Any]:
    """``job`` as JSON, without what the launcher adds."""
    given = asdict(job)
    return {key: value for key, value in given.items() if key not in ("local_rank", "local_size")}

