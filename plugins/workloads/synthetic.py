"""Requests drawn by distributions of their lengths, with prefixes that some of them share."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, model_validator

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.plugins.workloads.draws import Distribution, fixed, generator, length, longest, tokens


class SyntheticWorkload(Workload):
    """Requests of random tokens, each length drawn from a distribution; a share of them begins with one of a few common
    prefixes, as requests do that carry a system prompt or a document.

    Choose it to change one property of the load at a time: only lengths, only sharing. Real traffic has both in ways
    that no distribution of ours has: see the traces. Arrivals come from the load settings.
    """

    class Options(ComponentOptions):
        prompt: Distribution = fixed(128)
        """Tokens of the prompt behind any shared prefix: a number, or a table with `dist`: `uniform` (`low`, `high`) or
        `lognormal` (`median`, `sigma`, `max`)."""
        output: Distribution = fixed(32)
        """Tokens to generate, likewise."""
        families: Annotated[int, Field(ge=0)] = 0
        """How many common prefixes there are."""
        prefix: Distribution = fixed(128)
        """Tokens of each common prefix, drawn once for each."""
        share: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Of all requests, the share that begins with a common prefix."""
        requests: Annotated[int, Field(ge=1)] | None = None
        """How many there are; without it they never end."""

        @model_validator(mode="after")
        def _families_share(self) -> "SyntheticWorkload.Options":
            if not self.families and (self.prefix, self.share) != (fixed(128), 1.0):
                raise ValueError("'prefix' and 'share' are of no use without 'families'; say how many there are.")
            return self

    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        options = self.options
        prefix = longest(options.prefix) if options.families and options.share else 0
        prompt, output = longest(options.prompt), longest(options.output)
        if prefix + prompt + output > context.max_model_len:
            raise ConfigError(
                f"prefix, prompt and output may come to {prefix} + {prompt} + {output} tokens, and the model's context "
                f"has {context.max_model_len}. Make them shorter.", "prompt")
        return self._items(context)

    def _items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        options, random = self.options, generator(context, "synthetic")
        prefixes = [
            tokens(context, f"family {number}", length(options.prefix, generator(context, f"length {number}")))
            for number in range(options.families)]
        index = 0
        while options.requests is None or index < options.requests:
            belongs, number = random.random() < options.share, random.randrange(max(1, options.families))
            own = tokens(context, f"request {index}", length(options.prompt, random))
            shared = prefixes[number] if belongs and prefixes else ()
            yield WorkItem(
                shared + own, length(options.output, random), key=f"family {number}" if shared else "",
                shared=len(shared))
            index += 1
