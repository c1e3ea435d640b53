"""A queue policy: the order of requests."""

from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView


class MyPart(QueuePolicy):
    """Requests with few tokens go first, but each gains on the others while it waits, so that none waits for ever.

    Choose it ... (say when: `hotswap plugins show queue_policy:mypart` prints this).
    """

    class Options(ComponentOptions):
        tokens_per_second: Annotated[float, Field(gt=0)] = 100.0
        """A request that has waited for a second counts as so many tokens shorter."""

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        """Smaller is sooner. The end, ``sequence``, decides between equals.

        The length minus the bonus, rate * (now - arrival); ``now`` is the same for all, so it can be left out. A key
        that does not change stays in a heap. One that changes with time or state needs ``dynamic = True``.
        """
        length = view.prompt_length + view.max_new
        return (length + self.options.tokens_per_second * view.arrival, view.sequence)
