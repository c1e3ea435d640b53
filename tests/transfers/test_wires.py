"""The worker halves of transfers between engines: every byte arrives, whatever the two sides' shards, or is refused."""

import importlib.util
import itertools
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.kv_transfer import AxisShard, CachePages, GroupPages, LayerPages
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.testing.rig import build
from hotswap.plugins.kv_transfer.nixl import NixlWorker
from hotswap.plugins.kv_transfer.peer import SECRET
from hotswap.plugins.kv_transfer.peer_worker import READERS, PeerWorker
from hotswap.plugins.kv_transfer.rank_card import LayoutMismatchError, RankCard, plan_reads, take
from hotswap.plugins.kv_transfer.remembered import REMEMBERED
from hotswap.plugins.kv_transfer.shm import SharedMemoryWorker, remove
from hotswap.plugins.kv_transfer.tcp import Finished, TcpWorker

WIRES = {"shm": SharedMemoryWorker, "tcp": TcpWorker, "nixl": NixlWorker}
HEADS, HEAD_DIM, PAGE, PAGES = 4, 8, 4, 12
LAYERS = {"full": (0, 2), "window": (1, 3)}
AXES = ("page", "token", "kv_heads", "head_dim")


def whole(layer: int, part: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank with every head has in its pages: numbers that are found nowhere twice."""
    count = PAGES * PAGE * HEADS * HEAD_DIM
    numbers = torch.arange(count, dtype=torch.float64) + count * (2 * layer + part)
    return (numbers / 7).to(dtype).view(PAGES, PAGE, HEADS, HEAD_DIM)


def cache(
    heads: AxisShard, layers: Sequence[int] = (0, 1, 2, 3), *, empty: bool = False, dtype: str = "float32",
    axes: tuple[str, ...] = AXES, page: int = PAGE,
) -> CachePages:
    order = [AXES.index(axis) for axis in axes]

    def tensors(layer: int) -> tuple[torch.Tensor, ...]:
        parts = [whole(layer, part, getattr(torch, dtype))[:, :page, heads.start : heads.start + heads.count]
                 for part in range(2)]
        parts = [part.permute(order).contiguous() for part in parts]
        return tuple(torch.full_like(part, -1) if empty else part for part in parts)

    groups = {
        group: GroupPages(group, page, PAGES, axes, heads, tuple(
            LayerPages(layer, tensors(layer)) for layer in known if layer in layers))
        for group, known in LAYERS.items()}
    return CachePages({name: group for name, group in groups.items() if group.layers}, "cpu", dtype)


def shards(count: int) -> list[AxisShard]:
    """Of the heads over ``count`` ranks; with more ranks than heads, neighbours have the same one."""
    if count > HEADS:
        return [AxisShard(rank * HEADS // count, 1, HEADS) for rank in range(count)]
    return [AxisShard(rank * HEADS // count, HEADS // count, HEADS) for rank in range(count)]


class Sides:
    """Two engines' ranks, joined as their host halves would join them."""

    def __init__(self, folder: Path, wire: str) -> None:
        self.folder, self.wire = folder, wire
        self.workers: list[PeerWorker] = []
        self.keys = itertools.count()

    def engine(self, name: str, caches: Sequence[CachePages], **terms: Any) -> list[PeerWorker]:
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        made = []
        for pages in caches:
            worker = WIRES[self.wire]()
            worker.register(pages, {
                "folder": str(folder), "engine": name, "ranks": len(caches), "model": "m", "secret": SECRET.hex(),
                "timeout_s": 0.5, "host": "127.0.0.1", **terms})
            made.append(worker)
        self.workers += made
        return made

    def ticket(self, name: str, ranks: int, key: str) -> dict[str, Any]:
        return {"wire": self.wire, "folder": str(self.folder / name), "engine": name, "ranks": ranks, "key": key,
                "tokens": 1, "digest": "", "first": {}}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for key in ("k1", "k2", *(f"key{number}" for number in range(next(self.keys)))):
            for folder in self.folder.iterdir():
                remove(folder, key)


@pytest.fixture(params=["shm", "tcp", pytest.param("nixl", marks=pytest.mark.skipif(
    not importlib.util.find_spec("nixl_cu12"), reason="needs the extra nixl"))])
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sides]:
    threads = threading.active_count()
    made = Sides(tmp_path, request.param)
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name.startswith("hotswap-kv"):
            thread.join(5)
    assert threading.active_count() <= threads
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not left, left


@pytest.mark.parametrize("wire", WIRES)
def test_a_worker_half_that_was_never_registered_can_be_closed(wire: str) -> None:
    WIRES[wire]().close()


def test_a_registration_that_fails_half_way_is_taken_back(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture sees threads and files that are left."""
    ended: list[PeerWorker] = []
    honest = WIRES[sides.wire].shut
    monkeypatch.setattr(WIRES[sides.wire], "shut", lambda self: (ended.append(self), honest(self)))

    def full(path: Path, text: str) -> None:
        path.write_text(text[:10])
        raise OSError("no space is left")

    monkeypatch.setattr("hotswap.plugins.kv_transfer.peer_worker.write_private", full)
    worker = WIRES[sides.wire]()
    sides.workers.append(worker)
    monkeypatch.setitem(WIRES, sides.wire, lambda: worker)
    with pytest.raises(OSError, match="no space is left"):
        sides.engine("p", [cache(AxisShard(0, HEADS, HEADS))])
    worker.close()
    assert ended == [worker]


def reports(workers: Sequence[PeerWorker], seconds: float = 5.0) -> list[list[EndedTransfer]]:
    """The next report of each worker that has one to make."""
    found = []
    for worker in workers:
        ended: list[EndedTransfer] = []
        for _ in range(int(seconds / 0.05)):
            if ended := worker.report(0.05):
                break
        found.append(ended)
    return found


SOURCE, TARGET = {"full": [0, [3, 1, 7]], "window": [1, [5, 6]]}, {"full": [0, [2, 9, 4]], "window": [1, [8, 3]]}


def hand_over(
    sides: Sides, mine: list[PeerWorker], theirs: list[PeerWorker], name: str = "p", told_s: float = 5.0,
) -> list[Any]:
    """What both sides report. ``told_s``: how long the keeper may take to hear that a reader is done."""
    key = f"key{next(sides.keys)}"
    for worker in theirs:
        worker.begin([{"fetch": "in", "ticket": sides.ticket(name, len(mine), key), "cached": 4, "pages": TARGET}])
    for worker in mine:  # the reader may be sooner than the step that keeps
        worker.begin([{"keep": "out", "key": key, "pages": SOURCE}])
    return [reports(theirs), reports(mine, told_s)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (1, 8)])
def test_every_layer_and_head_arrives_whatever_the_tensor_sizes(
    sides: Sides, prefill: int, decode: int, dtype: str,
) -> None:
    if sides.wire == "nixl" and (prefill + decode > 4 or dtype != "float32"):
        pytest.skip("an agent takes half a second to start")
    mine = sides.engine("p", [cache(shard, dtype=dtype) for shard in shards(prefill)])
    theirs = sides.engine("d", [cache(shard, empty=True, dtype=dtype) for shard in shards(decode)])
    read, kept = hand_over(sides, mine, theirs)
    assert read == [[EndedTransfer("in")]] * decode
    assert kept == [[EndedTransfer("out")]] * prefill
    for worker, shard in zip(theirs, shards(decode), strict=True):
        for group, pages in worker.cache.groups.items():
            for layer, part in itertools.product(pages.layers, range(2)):
                heads = slice(shard.start, shard.start + shard.count)
                expected = whole(layer.layer, part, getattr(torch, dtype))[:, :, heads]
                got, filled = layer.tensors[part], TARGET[group][1]
                assert torch.equal(got[filled], expected[SOURCE[group][1]])
                others = [page for page in range(PAGES) if page not in filled]
                assert (got[others] == -1).all(), "a page that nobody named was written"


def test_stages_of_a_pipeline_are_found_by_their_layers(sides: Sides) -> None:
    everything = AxisShard(0, HEADS, HEADS)
    mine = sides.engine("p", [cache(everything, (0, 1)), cache(everything, (2, 3))])
    theirs = sides.engine("d", [cache(everything, empty=True)])
    assert hand_over(sides, mine, theirs) == [[[EndedTransfer("in")]], [[EndedTransfer("out")]] * 2]
    pages = theirs[0].cache.groups["full"].layers[1]
    assert torch.equal(pages.tensors[0][TARGET["full"][1]], whole(2, 0)[SOURCE["full"][1]])


def test_heads_in_another_place_of_the_layout_are_divided_too(sides: Sides) -> None:
    axes = ("page", "kv_heads", "token", "head_dim")
    mine = sides.engine("p", [cache(shard, axes=axes) for shard in shards(2)])
    theirs = sides.engine("d", [cache(AxisShard(0, HEADS, HEADS), axes=axes, empty=True)])
    assert hand_over(sides, mine, theirs)[0] == [[EndedTransfer("in")]]
    got = theirs[0].cache.groups["full"].layers[0].tensors[1][TARGET["full"][1]]
    assert torch.equal(got, whole(0, 1)[SOURCE["full"][1]].permute(0, 2, 1, 3))


@pytest.mark.parametrize(("change", "what"), [
    ({"dtype": "bfloat16"}, "dtype"), ({"axes": ("page", "kv_heads", "token", "head_dim")}, "page layout"),
    ({"page": 2}, "page size"), ({"layers": (0, 2)}, "cache groups"),
])
def test_a_peer_with_another_layout_is_refused_with_both_sides_and_the_keeper_is_told(
    sides: Sides, caplog: Any, change: dict[str, Any], what: str,
) -> None:
    everything = AxisShard(0, HEADS, HEADS)
    mine = sides.engine("p", [cache(everything)])
    theirs = sides.engine("d", [cache(everything, empty=True, **change)])
    assert hand_over(sides, mine, theirs) == [[[EndedTransfer("in", 4)]], [[EndedTransfer("out")]]]
    assert what in caplog.text
    for worker in (*mine, *theirs):
        assert worker.card.label in caplog.text


def test_a_peer_with_another_model_is_refused(sides: Sides, caplog: Any) -> None:
    everything = AxisShard(0, HEADS, HEADS)
    mine = sides.engine("p", [cache(everything)], model="revision-a")
    theirs = sides.engine("d", [cache(everything, empty=True)], model="revision-b")
    assert hand_over(sides, mine, theirs)[0] == [[EndedTransfer("in", 4)]]
    assert "revision-a" in caplog.text
    assert "revision-b" in caplog.text


def test_pages_that_have_expired_are_refused_and_those_given_up_go_at_once(sides: Sides) -> None:
    everything = AxisShard(0, HEADS, HEADS)
    [mine], [theirs] = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
    mine.begin([{"keep": "late", "key": "k1", "pages": SOURCE}, {"keep": "unwanted", "key": "k2", "pages": SOURCE}])
    assert reports([mine], 0.2) == [[]]
    mine.begin([{"expire": "k1"}])
    assert reports([mine]) == [[EndedTransfer("late", 0)]]
    theirs.begin([{"fetch": "in", "ticket": sides.ticket("p", 1, "k1"), "cached": 4, "pages": TARGET}])
    assert reports([theirs]) == [[EndedTransfer("in", 4)]]
    theirs.begin([{"release": sides.ticket("p", 1, "k2")}])
    assert reports([mine]) == [[EndedTransfer("unwanted")]]


def test_who_is_gone_cannot_be_read_from(sides: Sides) -> None:
    everything = AxisShard(0, HEADS, HEADS)
    [mine], [theirs] = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
    mine.close()
    theirs.begin([{"fetch": "in", "ticket": sides.ticket("p", 1, "k1"), "cached": 4, "pages": TARGET}])
    assert reports([theirs]) == [[EndedTransfer("in", 4)]]


def test_what_lies_in_the_folder_is_for_nobody_else(sides: Sides) -> None:
    everything = AxisShard(0, HEADS, HEADS)
    [mine] = sides.engine("p", [cache(everything)])
    mine.begin([{"keep": "out", "key": "k1", "pages": SOURCE}])
    reports([mine], 0.3)
    for path in (sides.folder / "p").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    mine.begin([{"expire": "k1"}])
    assert reports([mine]) == [[EndedTransfer("out", 0)]]


class TestShm:
    @pytest.fixture
    def sides(self, tmp_path: Path) -> Iterator[Sides]:
        made = Sides(tmp_path, "shm")
        yield made
        made.close()

    @pytest.mark.parametrize("cut", [1, 100, 5000])
    def test_a_file_that_was_cut_is_refused(self, sides: Sides, cut: int) -> None:
        everything = AxisShard(0, HEADS, HEADS)
        [mine], [theirs] = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
        mine.begin([{"keep": "out", "key": "k1", "pages": SOURCE}])
        path = sides.folder / "p" / f"k1.{mine.rank}"
        while not path.exists():
            reports([mine], 0.05)
        os.truncate(path, path.stat().st_size - cut)
        theirs.begin([{"fetch": "in", "ticket": sides.ticket("p", 1, "k1"), "cached": 4, "pages": TARGET}])
        assert reports([theirs]) == [[EndedTransfer("in", 4)]]
        assert reports([mine]) == [[EndedTransfer("out")]]

    def test_pages_that_expire_before_they_are_written_are_given_up_once_they_are(
        self, sides: Sides, monkeypatch: Any,
    ) -> None:
        from hotswap.plugins.kv_transfer import shm

        begun, go_on = threading.Event(), threading.Event()

        def slowly(*arguments: Any) -> Any:
            begun.set()
            assert go_on.wait(5)
            return take(*arguments)

        monkeypatch.setattr(shm, "take", slowly)
        [mine] = sides.engine("p", [cache(AxisShard(0, HEADS, HEADS))])
        mine.begin([{"keep": "out", "key": "k1", "pages": SOURCE}])
        assert begun.wait(5)
        mine.begin([{"expire": "k1"}])
        assert reports([mine], 0.1) == [[]], "the pages are being read"
        go_on.set()
        assert reports([mine]) == [[EndedTransfer("out", 0)]]
        assert not list((sides.folder / "p").glob("k1.*"))


    def test_pages_are_written_while_every_reader_waits(self, sides: Sides) -> None:
        everything = AxisShard(0, HEADS, HEADS)
        [mine], [theirs] = (
            sides.engine("p", [cache(everything)], timeout_s=30),
            sides.engine("d", [cache(everything, empty=True)], timeout_s=30))
        mine.begin([
            {"fetch": f"in{number}", "ticket": sides.ticket("d", 1, f"never{number}"), "cached": 4, "pages": TARGET}
            for number in range(READERS)])
        assert hand_over(sides, [mine], [theirs]) == [[[EndedTransfer("in")]], [[EndedTransfer("out")]]]


class TestTcp:
    @pytest.fixture
    def sides(self, tmp_path: Path) -> Iterator[Sides]:
        made = Sides(tmp_path, "tcp")
        yield made
        made.close()

    def test_another_secret_opens_nothing(self, sides: Sides, caplog: Any) -> None:
        everything = AxisShard(0, HEADS, HEADS)
        mine = sides.engine("p", [cache(everything)])
        theirs = sides.engine("d", [cache(everything, empty=True)], secret=os.urandom(32).hex())
        assert hand_over(sides, mine, theirs, told_s=0.3) == [[[EndedTransfer("in", 4)]], [[]]]
        assert "secret" in caplog.text

    @pytest.mark.parametrize("answer", [
        b"", struct.pack("<IB", 1 << 31, 21), struct.pack("<IB", 10, 21) + b"0123456789",
        struct.pack("<IB", 2, 99) + b"{}", struct.pack("<IB", 1000, 21) + b"cut",
    ], ids=["hangs up", "announces too much", "sends too little", "sends nonsense", "is cut in the middle"])
    def test_a_peer_that_breaks_the_protocol_costs_one_transfer(
        self, sides: Sides, monkeypatch: Any, answer: bytes,
    ) -> None:
        from hotswap.core.execution.channel import Channel
        from hotswap.plugins.kv_transfer import tcp

        everything = AxisShard(0, HEADS, HEADS)
        [mine], [theirs] = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
        honest = tcp.connect

        def impostor(*arguments: Any) -> Channel:
            ours, its = socket.socketpair()
            its.sendall(answer)
            its.shutdown(socket.SHUT_WR)
            its.close()
            return Channel(ours)

        monkeypatch.setattr(tcp, "connect", impostor)
        assert hand_over(sides, [mine], [theirs], told_s=0.2)[0] == [[EndedTransfer("in", 4)]]
        monkeypatch.setattr(tcp, "connect", honest)
        assert hand_over(sides, [mine], [theirs]) == [[[EndedTransfer("in")]], [[EndedTransfer("out")]]]
        mine.begin([{"expire": "key0"}])
        assert reports([mine]) == [[EndedTransfer("out", 0)]]

    def test_pages_are_copied_while_others_are_kept_and_expire(self, sides: Sides, monkeypatch: Any) -> None:
        """What is being copied stays as it is until it has been; nobody else waits for that."""
        from hotswap.plugins.kv_transfer import tcp

        everything = AxisShard(0, HEADS, HEADS)
        [mine], [theirs] = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
        copying, go_on, honest = threading.Event(), threading.Event(), tcp.take

        def slowly(*arguments: Any) -> list[torch.Tensor]:
            copying.set()
            go_on.wait(10)
            return honest(*arguments)

        monkeypatch.setattr(tcp, "take", slowly)
        mine.begin([{"keep": "out", "key": "k1", "pages": SOURCE}])
        theirs.begin([{"fetch": "in", "ticket": sides.ticket("p", 1, "k1"), "cached": 4, "pages": TARGET}])
        assert copying.wait(5)
        step = threading.Thread(target=mine.begin, daemon=True, args=([
            {"keep": "other", "key": "k2", "pages": SOURCE}, {"expire": "k1"}, {"expire": "k2"}],))
        step.start()
        step.join(2)
        waited, early = step.is_alive(), reports([mine], 0.3)
        go_on.set()
        assert not waited, "a step waits for a copy"
        assert early == [[EndedTransfer("other", 0)]], "pages that are being copied are given away"
        assert reports([mine]) == [[EndedTransfer("out", 0)]]
        assert reports([theirs]) == [[EndedTransfer("in", 4)]], "there was more to read"

    def test_readers_of_what_is_never_kept_are_forgotten_in_time(self, sides: Sides) -> None:
        [mine] = sides.engine("p", [cache(AxisShard(0, HEADS, HEADS))])
        assert isinstance(mine, TcpWorker)
        for number in range(2 * REMEMBERED):
            mine._finish(Finished(f"lost{number}", "reader", 2))
            mine.expire(f"gone{number}")
        assert len(mine._early) == len(mine._gone) == REMEMBERED
        assert not mine._kept

    @pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "a..b", "0.0.0.0"])
    def test_a_host_at_which_nobody_can_listen_is_refused_with_its_path(self, host: str) -> None:
        """Where the ranks are built, before they have loaded anything."""
        with pytest.raises(ConfigError, match=r"kv_transfer\.host: a rank cannot listen at .*give an IPv4 address"):
            build("kv_transfer", "tcp", host=host).worker()

    def test_a_peer_that_stands_still_is_given_up_after_a_time(self, sides: Sides, monkeypatch: Any) -> None:
        everything = AxisShard(0, HEADS, HEADS)
        [mine] = sides.engine("p", [cache(everything)])
        [theirs] = sides.engine("d", [cache(everything, empty=True)], timeout_s=0.2)
        monkeypatch.setattr(mine, "_serve", lambda channel: threading.Event().wait(1.0))
        theirs.begin([{"fetch": "in", "ticket": sides.ticket("p", 1, "k"), "cached": 4, "pages": TARGET}])
        assert reports([theirs]) == [[EndedTransfer("in", 4)]]


@pytest.mark.skipif(not importlib.util.find_spec("nixl_cu12"), reason="needs the extra nixl")
class TestNixl:
    """A transfer that NIXL calls unfinished (PROC) may still write into the pages."""

    @pytest.fixture
    def slow(self, tmp_path: Path, monkeypatch: Any) -> Iterator[tuple[PeerWorker, PeerWorker, threading.Event]]:
        """Keeper and reader, whose transfer is under way until the event."""
        sides, ended, begun = Sides(tmp_path, "nixl"), threading.Event(), threading.Event()
        everything = AxisShard(0, HEADS, HEADS)
        [mine], [theirs] = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
        agent: Any = theirs._agent  # type: ignore[attr-defined]
        check, transfer = agent.check_xfer_state, agent.transfer

        def start(handle: Any) -> str:
            transfer(handle)
            begun.set()
            return "PROC"

        monkeypatch.setattr(agent, "transfer", start)
        monkeypatch.setattr(agent, "check_xfer_state", lambda one: check(one) if ended.is_set() else "PROC")
        theirs.begin([{"fetch": "in", "ticket": sides.ticket("p", 1, "k1"), "cached": 4, "pages": TARGET}])
        mine.begin([{"keep": "out", "key": "k1", "pages": SOURCE}])
        assert begun.wait(5)
        yield mine, theirs, ended
        ended.set()
        sides.close()

    @pytest.mark.parametrize("gone", [False, True])
    def test_a_read_is_reported_when_it_has_ended_and_not_when_its_time_is_over_or_its_keeper_gone(
        self, slow: Any, caplog: Any, gone: bool,
    ) -> None:
        mine, theirs, ended = slow
        for channel in list(mine._channels) if gone else ():
            channel.close()
        for _ in range(100):
            assert reports([theirs], 0.1) == [[]]
            if "the pages are held" in caplog.text:
                break
        assert "the pages are held" in caplog.text
        assert ("which has hung up" in caplog.text) is gone
        ended.set()
        if gone:
            mine.close()  # or it would move nothing, and NIXL never say that it has ended
        assert reports([theirs]) == [[EndedTransfer("in", 4 if gone else None)]]

    def test_a_keeper_whose_agent_fails_goes_on_moving_it_and_says_so_once(
        self, slow: Any, monkeypatch: Any, caplog: Any,
    ) -> None:
        mine, theirs, ended = slow
        honest, failures = mine._agent.get_new_notifs, iter([RuntimeError("NIXL_ERR_BACKEND")] * 2)

        def moved() -> Any:
            if (failure := next(failures, None)) is not None:
                raise failure
            ended.set()
            return honest()

        monkeypatch.setattr(mine._agent, "get_new_notifs", moved)
        assert reports([theirs]) == [[EndedTransfer("in")]]
        assert caplog.text.count("cannot be moved on") == 1

    def test_a_close_moves_on_who_reads_from_here_until_its_own_reads_have_ended(
        self, slow: Any, monkeypatch: Any, caplog: Any,
    ) -> None:
        """Or two engines that read from each other and close would wait for each other."""
        _, theirs, ended = slow
        monkeypatch.setattr(theirs._agent, "get_new_notifs", ended.set)
        assert not ended.is_set()
        theirs.close()
        assert ended.is_set()
        assert "stays in memory" not in caplog.text

    def test_memory_that_is_read_into_stays_registered(self, slow: Any, monkeypatch: Any) -> None:
        _, theirs, ended = slow
        deregister, seen = theirs._agent.deregister_memory, []
        monkeypatch.setattr(theirs._agent, "deregister_memory", lambda memory: (
            seen.append(ended.is_set()), deregister(memory)))
        closing = threading.Thread(target=theirs.close)
        closing.start()
        closing.join(0.1)
        ended.set()
        closing.join(5)
        assert seen == [True]

    def test_agents_that_have_moved_pages_use_no_processor_while_nothing_is_read(
        self, tmp_path: Path, processor_share: Callable[[float], float],
    ) -> None:
        sides = Sides(tmp_path, "nixl")
        everything = AxisShard(0, HEADS, HEADS)
        mine, theirs = sides.engine("p", [cache(everything)]), sides.engine("d", [cache(everything, empty=True)])
        try:
            assert hand_over(sides, mine, theirs) == [[[EndedTransfer("in")]], [[EndedTransfer("out")]]]
            assert processor_share(0.04) < 0.04
        finally:
            sides.close()

    def test_a_close_lets_the_agent_go(self, tmp_path: Path) -> None:
        sides = Sides(tmp_path, "nixl")
        [worker] = sides.engine("p", [cache(AxisShard(0, HEADS, HEADS))])
        agent: Any = weakref.ref(worker._agent)  # type: ignore[attr-defined]
        sides.close()
        assert agent() is None

    def test_a_read_that_never_ends_delays_a_close_but_does_not_hang_it(
        self, slow: Any, monkeypatch: Any, caplog: Any,
    ) -> None:
        _, theirs, _ = slow
        seen: list[Any] = []
        for name in ("deregister_memory", "release_xfer_handle"):
            monkeypatch.setattr(theirs._agent, name, seen.append)
        theirs.close()
        theirs._pool.shutdown(wait=True)
        assert not seen
        assert "stays in memory" in caplog.text


def test_without_the_package_the_message_names_the_extra(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"nixl-cu12 is not installed; install hotswap\[nixl\]"):
        build("kv_transfer", "nixl")


def card(rank: str, shard: AxisShard) -> RankCard:
    return RankCard.of(cache(shard), "e", rank, "m", {})


@pytest.mark.parametrize(("theirs", "mine"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_reads_cover_each_head_of_each_layer_once(theirs: int, mine: int) -> None:
    peers = [card(str(rank), shard) for rank, shard in enumerate(shards(theirs))]
    for shard in shards(mine):
        read = plan_reads(card("x", shard), peers)
        covered = sorted(
            (layer, one.first_head + head) for one in read for layer in one.layers for head in range(one.heads))
        assert covered == [(layer, shard.start + head) for layer in range(4) for head in range(shard.count)]


def test_a_head_that_nobody_has_is_missed_at_once() -> None:
    with pytest.raises(LayoutMismatchError, match="needs head 2 of layer 0"):
        plan_reads(card("x", AxisShard(0, 4, 4)), [card("0", AxisShard(0, 2, 4))])
