"""A workload: where the requests of an experiment come from."""

import random
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext


class MyPart(Workload):
    """Questions about a few long documents: prompts that share their beginning, and differ in their end.

    Choose it ... (say when: `hotswap plugins show workload:mypart` prints this).
    """

    class Options(ComponentOptions):
        documents: Annotated[int, Field(ge=1)] = 4
        """How many there are."""
        document_tokens: Annotated[int, Field(ge=1)] = 200
        """Their length."""
        question_tokens: Annotated[int, Field(ge=1)] = 20
        """The length of what follows them, which no two requests share."""
        max_tokens: Annotated[int, Field(ge=1)] = 32
        """Of each answer."""

    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        """Endless. Each call begins anew, and the same seed gives the same requests."""
        options = self.options
        longest = options.document_tokens + options.question_tokens + options.max_tokens
        if longest > context.max_model_len:
            raise ConfigError(
                f"a request has {longest} tokens, the context {context.max_model_len}", "document_tokens")
        return self._draw(context)

    def _draw(self, context: WorkloadContext) -> Iterator[WorkItem]:
        draw = random.Random(context.seed)

        def text(length: int) -> tuple[int, ...]:
            return tuple(draw.randrange(context.vocab_size) for _ in range(length))

        documents = [text(self.options.document_tokens) for _ in range(self.options.documents)]
        while True:
            number = draw.randrange(len(documents))
            yield WorkItem(
                documents[number] + text(self.options.question_tokens), self.options.max_tokens,
                key=f"document {number}", shared=self.options.document_tokens)
