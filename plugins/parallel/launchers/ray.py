"""Workers as actors of a Ray cluster."""

import json
import os
import sys
from collections.abc import Sequence
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.execution.child import call
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.parallel import Launcher
from hotswap.plugins.parallel.launchers.local import loopback


class Connection:
    """This process's to a Ray cluster, of which Ray knows one: launchers share it, and the last of them ends it. One
    that was there before them is whoever's made it, and stays."""

    def __init__(self) -> None:
        self._lock, self._users, self._made = Lock(), 0, False

    def join(self, ray: Any, address: str, environment: dict[str, str]) -> None:
        """What ``ray.init`` raises, where there is no cluster."""
        with self._lock:
            if not self._users:
                self._made = not ray.is_initialized()
            if not ray.is_initialized():
                ray.init(address=address, runtime_env={"env_vars": environment})
            self._users += 1

    def leave(self, ray: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._made and not self._users:
                ray.shutdown()


_CONNECTION = Connection()


class RayLauncher(Launcher):
    """An actor a rank, in one placement group (Moritz et al., "Ray", 2018). Choose it to spread ranks over the machines
    of a Ray cluster; on one machine `local` starts sooner and needs nothing.

    Ray starts processes and says when they end, no more: a rank gets a function's name and JSON, and talks to its
    executor over a TCP channel that asks for the secret. Every machine must have hotswap and the model under the same
    paths.

    Use it on a private network alone. The ranks' channel proves who is there, and encrypts nothing: prompts travel over
    it, and the secret of a KV transfer. torch.distributed proves nothing either: the store where ranks meet listens on
    every interface of this machine, gloo's and NCCL's ports take whoever connects, and hidden states go over them as
    they are. What Ray itself sends, the channel's secret among it, Ray's TLS can protect, and nothing else. So: an
    interface or a VLAN between the machines that nobody else reaches, or a VPN, and all their ports closed to others.
    """

    class Options(ComponentOptions):
        address: str | None = None
        """Of the cluster, as `ray.init` takes it; by default the one that this machine belongs to."""
        strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
        """How ranks are placed: on as few machines as can be, or on as many."""
        cpus: Annotated[float, Field(gt=0)] = 1.0
        """CPUs that a rank reserves."""
        gpus: Annotated[float, Field(ge=0)] | None = None
        """GPUs that a rank reserves; by default 1 where the cluster has any."""
        timeout_s: Annotated[float, Field(gt=0)] = 60.0
        """How long to wait until the cluster has room."""

    options: Options

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._ray: Any = None
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def host(self) -> str | None:
        return str(self._cluster().util.get_node_ip_address())

    def start(self, entry: str, arguments: Sequence[dict[str, Any]]) -> None:
        ray, options = self._cluster(), self.options
        gpus = options.gpus if options.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        self._group = ray.util.placement_group(
            [{"CPU": options.cpus, **({"GPU": gpus} if gpus else {})}] * len(arguments), strategy=options.strategy)
        if not self._group.wait(options.timeout_s):
            raise ConfigError(
                f"the Ray cluster has no room for {len(arguments)} ranks of {options.cpus:g} CPUs and {gpus:g} GPUs "
                f"placed {options.strategy} ({ray.cluster_resources()}); add machines, or shard over fewer ranks",
                "execution.launcher")
        rank = ray.remote(num_cpus=options.cpus, num_gpus=gpus)(_Rank)
        self._actors = [
            rank.options(scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place)).remote()
            for place in range(len(arguments))
        ]
        alone = str(self.host()).startswith("127.")  # then gloo must not look for an address that others can reach
        environment = {"GLOO_SOCKET_IFNAME": name} if alone and (name := loopback()) else {}
        machines = ray.get([actor.machine.remote() for actor in self._actors])
        for place, (actor, given) in enumerate(zip(self._actors, arguments, strict=True)):
            here = {
                "local_rank": machines[:place].count(machines[place]), "local_size": machines.count(machines[place])}
            self._runs.append(actor.run.remote(entry, json.dumps({**given, **here}), environment))

    def ended(self) -> dict[int, str]:
        if not self._runs:
            return {}
        done, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        return {place: self._reason(run) for place, run in enumerate(self._runs) if run in done}

    def stop(self, timeout_s: float) -> None:
        if self._runs:
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], [], None
        if self._ray is not None:
            ray, self._ray = self._ray, None
            _CONNECTION.leave(ray)

    def _reason(self, run: Any) -> str:
        try:
            self._ray.get(run)
        except Exception as error:  # whatever Ray makes of it
            return f"ended: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
        return "ended by itself"

    def _cluster(self) -> Any:
        """Ray, connected. ConfigError where it is not installed, or where there is no cluster."""
        if self._ray is not None:
            return self._ray
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError as error:
            raise ConfigError(
                f"{self.label} needs Ray, which cannot be imported ({error}); pip install 'hotswap[ray]', or use the "
                "launcher local", "execution.launcher") from error
        environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            _CONNECTION.join(ray, self.options.address or "auto", environment)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {self.options.address or 'this machine'} ({error}); start one with "
                "'ray start --head', or give its address", "execution.launcher.address") from error
        self._ray = ray
        return ray


class _Rank:
    """What Ray runs."""

    def machine(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, entry: str, arguments: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        call(entry, json.loads(arguments))
