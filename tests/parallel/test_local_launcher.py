"""The local launcher and the crew that it starts: children that die at once, and ends that are bounded as a whole."""

import re
import socket
import sys
import threading
from subprocess import TimeoutExpired

import pytest

from hotswap.core.engine.clock import ManualClock
from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.execution.channel import Channel, Kind, encode
from hotswap.plugins.parallel import crew as module
from hotswap.plugins.parallel.crew import Crew
from hotswap.plugins.parallel.launchers.local import LocalLauncher
from hotswap.plugins.parallel.rank import Refusal


def test_a_child_that_dies_before_it_is_told_anything_is_named_and_says_itself_why(
    tmp_path, monkeypatch, capfd, scratch,
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho there is no interpreter here >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    launcher = LocalLauncher()
    with pytest.raises(ConfigError) as caught:
        launcher.start("no:where", [{"more": "x" * 2**20}] * 2)  # than a pipe holds, so that nobody reads it is seen
    assert re.fullmatch(
        rf"execution.launcher: worker 0 \(process \d+, {python}\) ended with exit code 3 before it was "
        "told what to do; what it wrote to standard error, above, says why", str(caught.value))
    assert capfd.readouterr().err == "there is no interpreter here\n"
    launcher.stop(1)


class Slow:
    """A process that ends ``seconds`` after the start, or when it is killed."""

    def __init__(self, clock, seconds):
        self.clock, self.end, self.killed = clock, clock.now() + seconds, False

    def poll(self):
        return -9 if self.killed else 0 if self.clock.now() >= self.end else None

    def wait(self, timeout):
        if self.poll() is None:
            self.clock.advance(min(timeout, self.end - self.clock.now()))
        if self.poll() is None:
            raise TimeoutExpired("slow", timeout)

    def kill(self):
        self.killed = True


def test_processes_that_are_slow_one_behind_the_other_have_their_time_together():
    launcher, clock = LocalLauncher(), ManualClock()
    launcher._clock, launcher._processes = clock, [Slow(clock, seconds) for seconds in (0.9, 1.8, 2.7)]
    slow = list(launcher._processes)
    launcher.stop(1.0)
    assert clock.now() == pytest.approx(1.0)
    assert [process.killed for process in slow] == [False, True, True]


class Started:
    """A launcher whose processes live for ever, but for those that have ``ended``. ``step``: seconds that pass whenever
    it is asked after them."""

    def __init__(self, clock, step=0.0, ended=()):
        self.clock, self.step, self.given, self.gone = clock, step, None, dict(ended)
        self.asked = threading.Event()

    def host(self):
        return None

    def start(self, entry, arguments):
        pass

    def ended(self):
        self.clock.advance(self.step)
        self.asked.set()
        return self.gone

    def stop(self, timeout_s):
        self.given = timeout_s


def test_the_time_to_start_is_the_clocks(scratch, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    clock = ManualClock()
    launcher = Started(clock, step=40.0)
    crew = Crew(launcher, 2, bytes(32), print, print, clock)
    crew.listen()
    with pytest.raises(EngineStoppedError, match="not every rank was ready within 100 s"):
        crew.start("no:where", [{}, {}], 100.0)
    assert clock.now() == 120.0
    crew.stop(1.0)


class Deaf:
    """A channel to a rank that reads nothing."""

    def __init__(self, clock):
        self.clock = clock

    def set_timeout(self, seconds):
        self.seconds = seconds

    def send(self, kind):
        self.clock.advance(self.seconds)
        raise ConnectionError("the peer reads nothing")

    def close(self):
        pass


def test_ranks_that_do_not_listen_take_no_more_time_together_than_one():
    clock = ManualClock()
    launcher = Started(clock)
    crew = Crew(launcher, 3, bytes(32), print, print, clock)
    crew._channels = {rank: Deaf(clock) for rank in range(3)}
    crew.stop(10.0)
    assert (clock.now(), launcher.given) == (10.0, 0.0)


def test_who_looks_for_a_cause_is_woken_when_another_rank_has_told_it(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 60.0)
    monkeypatch.setattr(module, "_LAST_WORDS_S", 60.0)
    launcher = Started(ManualClock())
    crew, told = Crew(launcher, 2, bytes(32), print, lambda problem: None), []
    thread = threading.Thread(target=lambda: told.append(crew._cause(1, "is gone")))
    thread.start()
    assert launcher.asked.wait(10)
    crew.fail("rank 0 has failed: the device is lost")
    thread.join(10)
    assert not thread.is_alive() and told == ["rank 1 is gone"]


def test_a_rank_that_has_ended_is_heard_out_before_its_end_is_taken_for_a_cause(monkeypatch):
    """It refused the config and ended, which its neighbour noticed before anybody had read the refusal."""
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_LAST_WORDS_S", 60.0)
    launcher = Started(ManualClock(), ended={1: "ended with exit code 0"})
    crew, told = Crew(launcher, 2, bytes(32), print, lambda problem: None), []
    ours, theirs = socket.socketpair()
    crew._channels = {1: Channel(ours)}
    thread = threading.Thread(target=lambda: told.append(crew._cause(0, "has failed: a neighbour is gone")))
    thread.start()
    assert launcher.asked.wait(10)
    Channel(theirs).send(Kind.REFUSED, encode(Refusal("the weights are green", "model.path")))
    theirs.close()
    crew._listen(1, crew._channels[1])
    thread.join(10)
    assert told == ["rank 0 has failed: a neighbour is gone"]
    assert crew.problem == "rank 1 refuses the config: the weights are green"
    crew.stop(1)
