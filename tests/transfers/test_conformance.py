"""Every KV transfer passes its conformance kit."""

import importlib.util
import random
from typing import Any

import pytest

from hotswap.core.interfaces.kv_transfer import KVTransfer, TransferWorker
from hotswap.core.testing.kv_handoff import KVHandoffSuite
from hotswap.core.testing.kv_transfer import KVTransferSuite
from hotswap.core.testing.kv_transfer_traffic import LateWorker
from hotswap.core.testing.rig import build
from hotswap.plugins.kv_transfer.copies import HostTierWorker, InOrder


class TestHostTier(KVTransferSuite):
    late = {"overlap": True}

    def make(self, **options: Any) -> KVTransfer:
        return build("kv_transfer", "host", **{"memory": 4096, "swap_overhead": 20, **options})

    def late_worker(self, worker: TransferWorker, rng: random.Random) -> TransferWorker:
        return LateWorker(HostTierWorker(True, InOrder()), rng)  # no thread: the same in every run


class TestHostTierOfAFewPages(TestHostTier):
    """Most of what is saved is evicted before it is asked for, and some suspensions find no room."""

    trials = 14

    def make(self, **options: Any) -> KVTransfer:
        return super().make(**{"memory": 1024, **options})


class Peer(KVHandoffSuite):
    """A transfer between engines; its reads are given up soon."""

    use: str
    trials = 8

    def make(self) -> KVTransfer:
        made: KVTransfer = build("kv_transfer", self.use, timeout_s=0.5)
        return made


class TestShm(Peer):
    use = "shm"


class TestTcp(Peer):
    use = "tcp"


@pytest.mark.skipif(not importlib.util.find_spec("nixl_cu12"), reason="needs the extra nixl")
class TestNixl(Peer):
    """An agent takes half a second to start, and each test starts some."""

    use = "nixl"
    trials = 2

    @pytest.fixture(autouse=True)
    def is_short(self, request: pytest.FixtureRequest) -> None:
        if "random_traffic" not in request.node.name and not request.config.getoption("--whole"):
            pytest.skip("only with --whole")
