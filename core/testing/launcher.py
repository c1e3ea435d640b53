"""What every launcher must do. The whole test file of a launcher::

    class TestMine(LauncherSuite):
        def make_launcher(self):
            return MyLauncher()

The processes write files, so they must see this machine's disk.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotswap.core.interfaces.parallel import Launcher
from hotswap.core.testing.executor import until

ENTRY = "hotswap.core.testing.ranks:note"
SECRET = "a secret that nobody may see"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class LauncherSuite:
    """Subclass it and provide ``make_launcher``."""

    patience_s = 60.0
    """How long a process may take to start, and to be told of when it has ended."""

    def make_launcher(self) -> Launcher:
        raise NotImplementedError("return a new instance of the launcher under test")

    @contextmanager
    def started(self, folder: Path, *processes: dict[str, Any]) -> Iterator[Launcher]:
        launcher = self.make_launcher()
        try:
            launcher.start(ENTRY, [
                {"path": str(folder / str(place)), "secret": SECRET, **given}
                for place, given in enumerate(processes)])
            yield launcher
        finally:
            launcher.stop(0.0)

    def read(self, folder: Path, count: int) -> list[dict[str, Any]]:
        """What each process says that it was told."""
        paths = [folder / str(place) for place in range(count)]
        until(lambda: all(path.exists() for path in paths), self.patience_s)
        return [json.loads(path.read_text()) for path in paths]

    def test_each_process_is_told_its_own_arguments_and_its_place(self, tmp_path: Path) -> None:
        with self.started(tmp_path, {"number": 7}, {"number": 8}, {"number": 9}):
            told = self.read(tmp_path, 3)
            assert [one["number"] for one in told] == [7, 8, 9]
            assert sorted(one["local_rank"] for one in told) == [0, 1, 2], "on one machine"
            assert {one["local_size"] for one in told} == {3}
            assert len({one["pid"] for one in told} - {os.getpid()}) == 3, "each is a process of its own"

    def test_a_secret_among_the_arguments_is_in_no_command_line_and_no_environment(self, tmp_path: Path) -> None:
        with self.started(tmp_path, {}):
            assert not self.read(tmp_path, 1)[0]["secret_is_visible"]

    def test_it_says_which_have_ended_and_why_without_waiting(self, tmp_path: Path) -> None:
        with self.started(tmp_path, {"seconds": 60}, {"code": 3}) as launcher:
            began = time.monotonic()
            launcher.ended()
            assert time.monotonic() - began < 5, "ended() has waited"
            until(lambda: 1 in launcher.ended(), self.patience_s)
            assert list(launcher.ended()) == [1], "one that runs is said to have ended"
            assert launcher.ended()[1], "it gives no reason"

    def test_stop_gives_them_their_time_and_then_ends_them_by_force(self, tmp_path: Path) -> None:
        """Their time together: one that is slow does not give the next one more."""
        go = tmp_path / "go"
        lives = [{"seconds": seconds, "go": str(go)} for seconds in (1.0, 2.7, 600)]
        with self.started(tmp_path, *lives) as launcher:
            pids = [one["pid"] for one in self.read(tmp_path, 3)]
            go.touch()
            began = time.monotonic()
            launcher.stop(2.0)
            assert time.monotonic() - began < 20, "stop has waited for a process that does not end"
            assert (tmp_path / "0.end").exists(), "one that would have ended in time was killed"
            assert not (tmp_path / "1.end").exists(), "one that was slow got the time of the one before it, too"
            until(lambda: not any(map(is_alive, pids)), 10)
            launcher.stop(1.0)

    def test_its_host_is_an_address_or_none(self) -> None:
        host = self.make_launcher().host()
        assert host is None or (isinstance(host, str) and host)
