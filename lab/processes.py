"""What /proc tells of processes: their CPU time and memory, and how busy the rest of the machine is."""

import os
import resource
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

BUSY_CORES = 0.25
"""A block beside a neighbour that used more than this is marked."""


class Seen(NamedTuple):
    """One process: its parent, and the CPU seconds that it has used and those of its children that it has waited for: a
    family's CPU time does not fall when one of it ends."""

    parent: int
    cpu: float


def processes() -> dict[int, Seen]:
    """Those that can be seen, by pid; empty where there is no /proc."""
    found = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            found[int(entry.name)] = Seen(int(fields[1]), sum(map(int, fields[11:15])) * _TICK_S)
    return found


def family(roots: Iterable[int], seen: dict[int, Seen]) -> set[int]:
    """``roots`` and all that they have started, as far as it lives."""
    children = defaultdict(list)
    for pid, process in seen.items():
        children[process.parent].append(pid)
    found, left = set[int](), list(roots)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children[pid]
    return found


def cpu_of(roots: Iterable[int]) -> float:
    """CPU seconds that ``roots`` and their descendants have used, those that have ended included."""
    seen = processes()
    return sum(seen[pid].cpu for pid in family(roots, seen) if pid in seen)


def cpu_of_this_process() -> float:
    """CPU seconds of this process and of children that have ended, finely, and of those that live, in clock ticks."""
    seen, pid = processes(), os.getpid()
    others = sum(seen[one].cpu for one in family([pid], seen) - {pid} if one in seen)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + others


def peak_memory_of(roots: Iterable[int]) -> int:
    """The most resident bytes of each process of the family, added up."""
    return sum(_high_water(pid) for pid in family(roots, processes()))


def _high_water(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def machine_cpu() -> float | None:
    """CPU seconds that the whole machine has been busy since it booted; None where it does not tell."""
    try:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) * _TICK_S


class Neighbours:
    """How many cores were used by processes that are not of our family, since it was made."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._begin, self._before = now, now(), self._foreign()

    def cores(self) -> float | None:
        """None where the machine does not tell."""
        before, after, seconds = self._before, self._foreign(), self._now() - self._begin
        if before is None or after is None or seconds <= 0:
            return None
        return max(0.0, after - before) / seconds

    @staticmethod
    def _foreign() -> float | None:
        busy = machine_cpu()
        return None if busy is None else busy - cpu_of([os.getpid()])
