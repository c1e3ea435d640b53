"""Data parallelism: equal engines side by side, each with the whole model and a cache of its own."""

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part
from hotswap.core.interfaces.deployment import Deployment, EngineClient, EngineFactory, Role
from hotswap.plugins.parallel.fleet import Fleet


class DataParallel(Deployment):
    """``replicas`` equal engines behind a router; what stands behind it in the list is the plan of each.

    Choose it when one engine answers fast enough but not often enough, and for a server that outlives the loss of an
    engine. Every replica takes the config as it is: ``max_running``, ``max_queue``, ``memory`` and ``num_blocks`` are
    each replica's. Prefixes are cached once a replica, so that a router that knows them saves work.
    """

    class Options(ComponentOptions):
        replicas: Annotated[int, Field(ge=1, le=1024)]
        """How many engines."""
        router: Annotated[ComponentRef, Part("router")] = ComponentRef(use="least_loaded")
        """Which of them gets a request."""

    options: Options

    def describe(self) -> Description:
        return Description(offers=frozenset({"peers"} if self.options.replicas > 1 else ()))

    def roles(self) -> list[Role]:
        return [Role("", self.options.replicas)]

    def start(self, factories: Sequence[EngineFactory], now: Callable[[], float]) -> EngineClient:
        return Fleet.start((factories, self.parts["router"]))[0]
