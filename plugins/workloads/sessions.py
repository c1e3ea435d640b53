"""Conversations of several turns."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.plugins.workloads.draws import Distribution, fixed, generator, length, longest, tokens


class SessionsWorkload(Workload):
    """Conversations: each turn's prompt is all that was said so far and a new message, sent a while after the answer
    came, as long as the context has room for it.

    The answers inside the prompts are drawn beforehand, as long as what is generated, and are not those of the model:
    so both arms of an experiment get the same prompts, whatever they generate. What a prefix cache can find of the turn
    before is therefore its prompt, and not its answer.

    Choose it to measure reuse between turns. Sessions come one after the other in the stream; when each begins is up to
    the load settings.
    """

    class Options(ComponentOptions):
        turns: Distribution = fixed(4)
        """Turns of a session: a number, or a table with `dist`: `uniform` (`low`, `high`) or `lognormal` (`median`,
        `sigma`, `max`)."""
        system: Annotated[int, Field(ge=0)] = 0
        """Tokens of a system prompt with which all sessions begin."""
        message: Distribution = fixed(64)
        """Tokens of each turn's new message."""
        output: Distribution = fixed(64)
        """Tokens of each answer."""
        think: Distribution = fixed(1)
        """Seconds between an answer and the next message."""
        sessions: Annotated[int, Field(ge=1)] | None = None
        """How many there are; without it they never end."""

    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        options = self.options
        message, output = longest(options.message), longest(options.output)
        if options.system + message + output > context.max_model_len:
            raise ConfigError(
                f"the first turn may come to {options.system} + {message} + {output} tokens, and the model's context "
                f"has {context.max_model_len}. Make system, message or output shorter.", "message")
        return self._items(context)

    def _items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        number = index = 0
        while self.options.sessions is None or number < self.options.sessions:
            for item in self._session(context, number, index):
                yield item
                index += 1
            number += 1

    def _session(self, context: WorkloadContext, number: int, first: int) -> Iterator[WorkItem]:
        options, random = self.options, generator(context, f"session {number}")
        said = tokens(context, "system", options.system)
        opening = 0
        for turn in range(length(options.turns, random)):
            message, output = length(options.message, random), length(options.output, random)
            pause = options.think.draw(random) if turn else 0.0
            said += tokens(context, f"session {number} message {turn}", message)
            if len(said) + output > context.max_model_len:
                return
            opening = opening or len(said)
            yield WorkItem(
                said, output, after=first + turn - 1 if turn else None, pause=pause, key=f"session {number}",
                shared=opening)
            said += tokens(context, f"session {number} answer {turn}", output)
