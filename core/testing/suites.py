"""Which suite tests which kind, and how little of its random lives is enough for a quick look."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class KitPart:
    """``suite`` is "module:Class", to be subclassed; ``maker`` the method that a subclass must write, which returns a
    new component. ``instead``: by what a component offers, the suite that tests such a one. ``quick``: attributes of
    the suites that make their run short."""

    suite: str
    maker: str
    quick: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def suites(self) -> list[str]:
        return [self.suite, *self.instead.values()]

    def suite_for(self, offers: Collection[str]) -> str:
        return next((suite for offer, suite in self.instead.items() if offer in offers), self.suite)

    def load(self) -> type:
        module, _, name = self.suite.partition(":")
        suite: type = getattr(import_module(module), name)
        return suite


def _part(module: str, suite: str, maker: str, **quick: Any) -> KitPart:
    return KitPart(f"hotswap.core.testing.{module}:{suite}", maker, quick)


SUITES: dict[str, KitPart] = {
    "scheduler": _part("scheduler", "SchedulerSuite", "make_scheduler", machine_examples=8),
    "queue_policy": _part("queue_policy", "QueuePolicySuite", "make_policy", machine_examples=4),
    "kvcache": _part("kvcache", "KVCacheManagerSuite", "make_manager", machine_examples=8),
    "eviction_policy": _part("eviction", "EvictionPolicySuite", "make_policy", machine_examples=40),
    "kv_transfer": replace(
        _part("kv_transfer", "KVTransferSuite", "make", trials=8),
        instead={"handoff": "hotswap.core.testing.kv_handoff:KVHandoffSuite"}),
    "attention": _part("attention", "AttentionSuite", "make_backend"),
    "speculator": _part("speculator", "SpeculatorSuite", "make_speculator"),
    "logits_processor": _part("logits", "LogitsProcessorSuite", "make_processor", cases=12),
    "model": _part("model", "ModelSuite", "make_model"),
    "quantization": _part("quantization", "QuantizationSuite", "make_quantization", shapes=((40, 96), (33, 64))),
    "operators": _part("operators", "OperatorsSuite", "make_operators"),
    "executor": _part("executor", "ExecutorSuite", "make_executor"),
    "launcher": _part("launcher", "LauncherSuite", "make_launcher"),
    "shard": _part("shard", "ShardStrategySuite", "make_strategy"),
    "deployment": _part("deployment", "DeploymentSuite", "make_deployment"),
    "router": _part("router", "RouterSuite", "make_router"),
    "observer": _part("observer", "ObserverSuite", "make_observer"),
    "workload": _part("workload", "WorkloadSuite", "make_workload"),
}
"""By kind."""
