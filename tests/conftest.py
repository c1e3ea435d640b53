"""Before any test module is imported."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

# Triton reads this while it is imported, which transformers does: without an NVIDIA driver its kernels are interpreted.
if find_spec("triton") and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def live_children(pid: int) -> list[int]:
    """Processes that have ``pid`` as their parent and are not zombies.

    Not from /proc/PID/task/TID/children, which the kernel fills reliably only while nobody starts or ends.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.fixture
def children() -> Callable[[int], list[int]]:
    """A function from a process id to the ids of its live children."""
    return live_children


def idle_share(enough: float) -> float:
    """How much of a processor all threads of this process use while the calling one sleeps for half a second. What has
    just ended may still be putting things away: at most three tries to find less than ``enough``."""
    for _ in range(3):
        begun, used = time.perf_counter(), time.process_time()
        time.sleep(0.5)
        share = (time.process_time() - used) / (time.perf_counter() - begun)
        if share < enough:
            break
    return share


@pytest.fixture
def processor_share() -> Callable[[float], float]:
    """A function that says how much of a processor this process uses while the caller sleeps; tries anew while that is
    not less than its argument."""
    return idle_share


@pytest.fixture(autouse=True)
def our_log_s_level() -> Iterator[None]:
    """Commands set it for their process, which here is that of the tests after them, too."""
    ours = logging.getLogger("hotswap")
    before = ours.level
    yield
    ours.setLevel(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", default=False,
        help="run every combination: of parts on the real model (half an hour), of what kernels are compiled for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --whole, what is marked so is left out."""
    if not config.getoption("--whole"):
        left = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
