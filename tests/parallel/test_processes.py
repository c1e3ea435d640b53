"""The processes executor with workers that do as they are told: verdicts in order, news, and every way to die."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.execution.channel import connect
from hotswap.core.interfaces.kvcache import CachePlan, GroupPlan
from hotswap.core.interfaces.messages import StepMessage
from hotswap.core.interfaces.parallel import RankPlan
from hotswap.core.interfaces.scheduler import Row

ROOT = Path(__file__).parents[2]


def message(step):
    return StepMessage(step, [Row(f"r{step}", 1)])


def test_verdicts_come_in_order_from_the_first_rank_of_the_last_stage_and_other_stages_hear_what_was_kept(launch):
    executor, info = launch(
        {"0": {"bytes_per_token": 100, "free": 4000}, "3": {"bytes_per_token": 80}}, stages=2)
    assert [(spec.bytes_per_token, spec.layers) for spec in info.cache_specs] == [(100, (0, 1, 2, 3))]
    assert info.free_bytes == 1000, "the poorest rank's, divided among the four that share this machine"
    executor.allocate(CachePlan({"full": GroupPlan(4, 4)}))
    tickets = [executor.submit(message(step)) for step in (1, 2, 3)]
    verdicts = [executor.collect(ticket) for ticket in tickets]
    assert [(verdict.step_id, verdict.rows[0].kept) for verdict in verdicts] == [(1, [2]), (2, [2]), (3, [2])]
    executor.collect(executor.submit(message(4)))
    heard = [report.statistics["heard"] for report in executor.report()]
    assert heard == [[3], [3], [0], [0]]
    assert executor.health() is None
    executor.stop()
    assert executor.health() == "stopped"
    with pytest.raises(EngineStoppedError, match="stopped"):
        executor.submit(message(5))


def test_a_killed_rank_ends_what_is_waited_for_within_five_seconds(launch, children, kill):
    executor, _ = launch({"0": {"seconds": 60}})
    ticket, second = executor.submit(message(1)), executor.submit(message(2))
    assert not executor.done(ticket)
    victim = max(children(os.getpid()))  # the rank that is not waited for
    begin = time.monotonic()
    kill(victim)
    for each in (ticket, second):
        with pytest.raises(EngineStoppedError, match="rank [01] was killed by SIGKILL"):
            executor.collect(each)
    assert time.monotonic() - begin < 5
    assert "SIGKILL" in executor.health()
    with pytest.raises(EngineStoppedError, match="SIGKILL"):
        executor.submit(message(3))
    with pytest.raises(EngineStoppedError, match="SIGKILL"):
        executor.report()
    begin = time.monotonic()
    executor.options = executor.options.model_copy(update={"stop_timeout_s": 0.5})
    executor.stop()
    assert time.monotonic() - begin < 5


def test_a_killed_rank_is_named_and_not_the_neighbours_whose_connections_it_broke(launch, kill, capfd, caplog):
    """All three are in the midst of sums, so that both others fail at once, and say so."""
    executor, _ = launch({str(rank): {"reduce": 10**9} for rank in range(3)}, width=3)
    ticket = executor.submit(message(1))
    time.sleep(1)
    begin = time.monotonic()
    kill(executor.parts["launcher"]._processes[1].pid)
    with pytest.raises(EngineStoppedError, match="^rank 1 was killed by SIGKILL$"):
        executor.collect(ticket)
    assert time.monotonic() - begin < 5
    assert executor.health() == "rank 1 was killed by SIGKILL"
    executor.stop()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "rank 1 was killed by SIGKILL"]
    assert "has failed" not in capfd.readouterr().err


def test_a_rank_that_fails_on_its_own_is_named_and_not_those_that_lose_it(launch, capfd):
    executor, _ = launch({"0": {"reduce": 10**9}, "1": {"raise": 1}, "2": {"reduce": 10**9}}, width=3)
    with pytest.raises(EngineStoppedError, match="^rank 1 has failed: RuntimeError: planted in a step$"):
        executor.collect(executor.submit(message(1)))
    executor.stop()
    told = capfd.readouterr().err
    assert told.count("Traceback") == 1
    assert "rank 1 has failed" in told


def test_a_rank_whose_server_was_killed_before_it_came_says_so_and_clears_up(scratch):
    from hotswap.plugins.parallel.rank import Job, job_arguments, serve

    left = scratch / "hotswap-left"
    left.mkdir()
    job = Job(
        2, f"unix:{left / 'ranks'}", bytes(32).hex(), f"file:{left / 'store'}", str(left), RankPlan(), "no:where", {},
        "cpu", 1.0, logging.WARNING)
    with pytest.raises(SystemExit, match=r"^rank 2: nobody waits for it any more: unix:.*No such file"):
        serve(job_arguments(job))
    assert not left.exists()


def test_what_a_lost_neighbour_says_is_one_line_without_its_source():
    from hotswap.plugins.parallel.rank import _short

    told = "RuntimeError: [/a/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4711\nThis may be anything"
    assert _short(told) == "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
    assert _short("") == ""


def test_what_fails_on_one_rank_alone_ends_the_engine_and_says_where(launch):
    executor, _ = launch({"1": {"raise": 1}})
    with pytest.raises(EngineStoppedError, match="rank 1 has failed: RuntimeError: planted in a step"):
        for step in range(1, 500):
            executor.collect(executor.submit(message(step)))
            time.sleep(0.01)


def test_a_rank_that_refuses_to_load_refuses_the_config_and_nothing_else_is_said(launch, capfd, caplog):
    with pytest.raises(ConfigError, match="model.path: the weights are green") as caught:
        launch({"1": {"refuse": "the weights are green"}})
    assert caught.value.path == "model.path"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "rank" not in capfd.readouterr().err


def test_a_rank_that_dies_before_it_is_ready_is_named(launch):
    with pytest.raises(EngineStoppedError, match="rank 1 (ended with exit code 7|is gone)"):
        launch({"1": {"exit": 7}})


def test_a_rank_without_memory_for_its_pages_says_so(launch):
    executor, _ = launch({"1": {"allocate": "no room for pages"}})
    with pytest.raises(MemoryError, match="^rank 1 has failed: MemoryError: no room for pages$"):
        executor.allocate(CachePlan({"full": GroupPlan(4, 4)}))


@pytest.mark.parametrize("fault, told", [
    ({"break": "the kernel is missing"}, "^rank 1 has failed: RuntimeError: the kernel is missing$"),
    ({"vanish": 7}, "^rank 1 ended with exit code 7$")])
def test_what_else_ends_a_rank_at_its_pages_is_no_lack_of_memory(launch, fault, told):
    executor, _ = launch({"1": fault})
    with pytest.raises(EngineStoppedError, match=told):
        executor.allocate(CachePlan({"full": GroupPlan(4, 4)}))


def test_a_rank_that_refuses_the_pages_refuses_the_config(launch):
    executor, _ = launch({"1": {"layout": "the pages lie askew"}})
    with pytest.raises(ConfigError, match="the pages lie askew") as caught:
        executor.allocate(CachePlan({"full": GroupPlan(4, 4)}))
    assert caught.value.path == "kv_transfer"


def test_ranks_that_do_not_come_in_time_are_given_up(launch):
    with pytest.raises(EngineStoppedError, match="not every rank was ready within 0.2 s"):
        launch(start_timeout_s=0.2, stop_timeout_s=0.1)


def test_strangers_at_the_socket_are_hung_up_on_and_harm_nothing(launch, scratch, monkeypatch, caplog):
    """One without the secret, one that talks nonsense, while the ranks start; and the socket is not for others."""
    from hotswap.plugins.parallel import crew

    seen = {}
    real = crew.Crew.listen

    def listen(self):
        address = real(self)
        place = Path(address.removeprefix("unix:"))
        seen["modes"] = place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777
        with pytest.raises(ConnectionError):
            connect(address, bytes(32), 0)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(place))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            stranger.recv(100)
        return address

    monkeypatch.setattr(crew.Crew, "listen", listen)
    with caplog.at_level(logging.WARNING):
        executor, _ = launch()
    assert seen["modes"] == (0o600, 0o700)
    assert caplog.text.count("somebody who is no rank of ours") == 2
    assert not list(scratch.glob("*/ranks")), "once all ranks are here, nobody can connect any more"
    executor.collect(executor.submit(message(1)))


def test_neither_command_line_nor_environment_shows_the_secret(launch, children, monkeypatch):
    secret = bytes(range(100, 132))
    monkeypatch.setattr("hotswap.plugins.parallel.processes.secrets.token_bytes", lambda count: secret)
    launch()
    ranks = children(os.getpid())
    assert len(ranks) == 2
    for pid in ranks:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert secret.hex().encode() not in shown


PARENT = """
import sys, time
sys.path[:0] = {paths!r}
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, WorkerRecipe
from hotswap.core.registry import Registry
class Factory:
    def recipe(self):
        return WorkerRecipe("planted_ranks:make", {{}}, "cpu")
executor = Registry().build("executor", ComponentRef(use="processes"), "execution")
executor.launch(Factory(), RankPlan((MeshDim("tensor", 2, ("heads",)),)))
print("ready", *[process.pid for process in executor.parts["launcher"]._processes], flush=True)
time.sleep(60)
"""


def test_ranks_end_when_their_server_is_killed_and_leave_nothing(launch, tmp_path, scratch):
    paths = [str(tmp_path), *sys.path]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(paths=paths)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(scratch)})
    with parent:
        word, *ranks = parent.stdout.readline().split()
        assert (word, len(ranks)) == ("ready", 2)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
              for pid in ranks):
        assert time.monotonic() < end, "a rank outlived its server"
        time.sleep(0.05)
