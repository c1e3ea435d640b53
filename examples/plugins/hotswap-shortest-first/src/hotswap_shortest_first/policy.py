"""Shortest job first, with ageing (the rule: Schrage, "A Proof of the Optimality of the Shortest Remaining Processing
Time Discipline", 1968; here by a request's whole length, which is known when it arrives)."""

from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView


class ShortestFirst(QueuePolicy):
    """Requests with few tokens go first. Choose it when short answers should not wait behind long ones.

    ``max_tokens`` counts as if it were used up: clients that leave it open go last.
    """

    class Options(ComponentOptions):
        tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
        """A request that has waited for a second counts as so many tokens shorter: nobody waits for ever."""

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        # The length minus the bonus, rate * (now - arrival). ``now`` is the same for all, so leaving it out keeps the
        # order; and a key that does not change can stay in a heap.
        length = view.prompt_length + view.max_new
        return (length + self.options.tokens_per_second * view.arrival, view.sequence)
