"""The kit draws from it twice, in parts, and with other seeds; then what is its own."""

from itertools import islice

from hotswap.core.testing.workload import WorkloadSuite, context
from hotswap_mypart import MyPart


class TestMyPart(WorkloadSuite):
    def make_workload(self) -> MyPart:
        return MyPart()

    def test_there_are_as_many_beginnings_as_documents(self) -> None:
        items = list(islice(self.make_workload().items(context()), 100))
        assert len({item.prompt[:200] for item in items}) == 4
        assert len({item.prompt for item in items}) == 100
