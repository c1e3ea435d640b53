"""The host tier passes the conformance kit of KV transfers."""

from typing import Any

from hotswap.core.interfaces.kv_transfer import KVTransfer
from hotswap.core.testing.kv_transfer import KVTransferSuite
from hotswap.core.testing.rig import build


class TestHostTier(KVTransferSuite):
    late = {"overlap": True}

    def make(self, **options: Any) -> KVTransfer:
        return build("kv_transfer", "host", **{"memory": 4096, "swap_overhead": 20, **options})
