"""A router: which engine of a deployment gets a request."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.deployment import Candidate, Router
from hotswap.core.request import Request


class MyPart(Router):
    """The better of two engines drawn at random (Mitzenmacher, "The Power of Two Choices", 2001).

    Choose it ... (where many senders share the engines and their counts are old: nobody runs after the same one).
    """

    class Options(ComponentOptions):
        seed: int = 0
        """Of the draws, so that a run can be repeated."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.random = random.Random(self.options.seed)

    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        """One of the candidates, all of which are well and have room. ``dispatched`` counts what was sent, at once."""
        drawn = self.random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda candidate: candidate.loads.dispatched).engine
