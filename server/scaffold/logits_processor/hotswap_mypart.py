"""A logits processor: changes the logits of those requests that ask for it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from hotswap.core.interfaces import component
from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest

if TYPE_CHECKING:
    import torch


class MyPart(LogitsProcessor):
    """Makes some tokens likelier, for requests that ask for it: ``"extra": {"mypart": {"tokens": [42], "by": 5}}``.

    Choose it ... (say when: `hotswap plugins show logits_processor:mypart` prints this).
    """

    class Options(component.ComponentOptions):
        limit: Annotated[float, Field(gt=0)] = 100.0
        """What a request adds is cut to so much, up or down."""

    class RequestOptions(component.RequestOptions):
        tokens: Annotated[list[int], Field(min_length=1, max_length=100, examples=[[3, 5]])]
        """Token ids."""
        by: Annotated[float, Field(ge=-100, le=100)] = 1.0
        """Added to their logits."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.asked: dict[str, tuple[list[int], float]] = {}

    def configure(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def wants(self, request: NewRequest) -> bool:
        """Other requests cost nothing: they reach none of the methods below."""
        return self.name in request.sampling.extra

    def begin(self, request: NewRequest) -> None:
        """It arrives; what it sent has been validated. After a suspension it arrives again."""
        asked = self.RequestOptions.model_validate(request.sampling.extra[self.name])
        by = max(-self.options.limit, min(self.options.limit, asked.by))
        self.asked[request.id] = [token for token in asked.tokens if 0 <= token < self.vocab_size], by

    def apply(self, logits: "torch.Tensor", rows: Sequence[LogitsRow]) -> None:
        """Change ``logits`` [N, V] in place, at the given rows only."""
        for row in rows:
            tokens, by = self.asked[row.request]
            logits[row.index, tokens] += by

    def end(self, request: str) -> None:
        self.asked.pop(request, None)
