"""The kit suspends, aborts and undoes, on a device that checks every slot it reads; then what is its own."""

from typing import Any

from hotswap.core.testing.kv_transfer import KVTransferSuite
from hotswap_mypart import MyPart


class TestMyPart(KVTransferSuite):
    def make(self, **options: Any) -> MyPart:
        return MyPart(MyPart.Options(**options))

    def test_a_request_that_does_not_fit_is_computed_again(self) -> None:
        rig = self.swapping(late=False)
        rig.loop.transfers.component.inner.options = MyPart.Options(max_pages=1)  # type: ignore[union-attr]
        request = rig.add("a", list(range(9)), 12)
        self.suspend(rig, "a", after=3)
        rig.run()
        assert len(rig.client.tokens(request.id)) == 12
