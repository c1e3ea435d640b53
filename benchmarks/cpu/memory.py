"""How much memory the processes of an engine have needed."""

from collections.abc import Iterable
from pathlib import Path

from hotswap.lab.processes import family, processes


def peak_of(roots: Iterable[int], proc: Path = Path("/proc")) -> int:
    """Bytes: for each living process of the family its proportional set size now, in which shared pages count once, and
    what it has had beyond what it has now. At least the family's true peak, where what was given back was its own; read
    once, since reading it often would slow what is measured."""
    return sum(_peak(proc / str(pid)) for pid in family(roots, processes()))


def _peak(folder: Path) -> int:
    try:
        sizes = _kib(folder / "smaps_rollup") | _kib(folder / "status")
    except OSError:
        return 0  # it has just ended
    return 1024 * (sizes.get("Pss", 0) + sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))


def _kib(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}
