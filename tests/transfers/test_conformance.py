"""The host tier passes the conformance kit of KV transfers."""

import random
from typing import Any

from hotswap.core.interfaces.kv_transfer import KVTransfer, TransferWorker
from hotswap.core.testing.kv_transfer import KVTransferSuite, LateWorker
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
