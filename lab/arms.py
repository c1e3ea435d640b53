"""Starts the arms of a plan: engines of this process that share their weights, or servers."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from hotswap.core.config import ResolvedConfig, load_config
from hotswap.core.engine.build import build_engine
from hotswap.core.execution.builder import SharedModels
from hotswap.lab.plan import ArmPlan, Plan, path_of
from hotswap.lab.refusals import at
from hotswap.lab.run import Arm
from hotswap.lab.targets.engine import EngineTarget
from hotswap.lab.targets.openai import OpenAITarget
from hotswap.lab.targets.server import ServerTarget
from hotswap.lab.targets.target import Target

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def started(plan: Plan, now: Callable[[], float], *, progress: bool = True) -> Iterator[list[Arm]]:
    """The arms, ready to serve, until the end. ConfigError for what does not start."""
    with contextlib.ExitStack() as stack:
        shared = _Shared(plan, now, progress)
        arms = []
        for arm in plan.arms:
            if arm.endpoint is not None:
                target = _foreign(arm, plan, now)
            elif plan.separate:
                target = _server(arm, plan, now)
            else:
                target = shared.start(arm)
            stack.callback(target.close)
            arms.append(Arm(arm.name, target, arm.endpoint.base if arm.endpoint is not None else arm.name))
        yield arms


def _foreign(arm: ArmPlan, plan: Plan, now: Callable[[], float]) -> Target:
    assert arm.endpoint is not None
    with at(path_of(plan.experiment, arm.name)):
        target = OpenAITarget(arm.endpoint, now)
        target.require_reset()
    return target


def _server(arm: ArmPlan, plan: Plan, now: Callable[[], float]) -> Target:
    assert arm.config is not None
    with at(path_of(plan.experiment, arm.name)):
        return ServerTarget(arm.config, plan.experiment.sampling, now)


class _Shared:
    """Engines of this process. Those whose config leaves the size of the cache open get as much as the base has."""

    def __init__(self, plan: Plan, now: Callable[[], float], progress: bool) -> None:
        self._sampling, self._now, self._progress = plan.experiment.sampling, now, progress
        self._models = SharedModels(sum(arm.config is not None for arm in plan.arms), in_turn=True)
        self._kv_bytes: int | None = None

    def start(self, arm: ArmPlan) -> Target:
        assert arm.config is not None
        resolved = arm.config
        section = resolved.config.kvcache
        if self._kv_bytes is not None and section.memory is None and section.num_blocks is None:
            resolved = _with_memory(resolved, self._kv_bytes)
        built = build_engine(resolved, progress=self._progress, models=self._models)
        try:
            target = EngineTarget(built, self._sampling, self._now)
        except BaseException:
            built.engine.stop()
            raise
        if not built.facts.concurrent and self._kv_bytes is None and self._models.engines > 1:
            logger.warning("engines cannot run this model at the same time: each arm loads its weights anew")
        self._kv_bytes = self._kv_bytes or target.kv_bytes()
        return target


def _with_memory(resolved: ResolvedConfig, num_bytes: int) -> ResolvedConfig:
    values = resolved.config.model_dump(mode="json", exclude_unset=True)
    values["kvcache"] = {**values.get("kvcache", {}), "memory": num_bytes}
    return load_config(values, environ={})
