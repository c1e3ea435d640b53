"""The kit drives the real engine loop with it, on a fake device that checks every read; then what is its own."""

from hotswap.core.testing.scheduler import SchedulerSuite
from hotswap_mypart import MyPart


class TestMyPart(SchedulerSuite):
    def make_scheduler(self) -> MyPart:
        return MyPart()

    def test_a_long_prompt_is_computed_in_chunks(self) -> None:
        rig = self.rig(max_batch_tokens=64)
        rig.loop.parts.scheduler = MyPart(MyPart.Options(max_chunk=10))
        rig.add("long", [1] * 25, 1)
        rig.run()
        assert [row.n_tokens for message in rig.executor.messages for row in message.rows] == [10, 10, 5]
