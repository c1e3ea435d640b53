"""Every component in the box passes the kit of its kind, as a plugin author's would.

Kinds with a matrix of options have it in folders of their own: schedulers and queue policies in ``tests/schedulers``,
KV managers and eviction policies in ``tests/kvcache``, transfers in ``tests/transfers``, attention in
``tests/attention``, logits processors in ``tests/sampling``, routers in ``tests/deployments``, speculators with models
of their own in ``tests/speculators``, workloads in ``tests/workloads``.
"""

import pytest

from hotswap.core.hooks import Observer
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.deployment import Deployment
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.operators import Operators
from hotswap.core.interfaces.parallel import Executor, Launcher, MeshDim, RankPlan, ShardStrategy
from hotswap.core.interfaces.scheduler import QueuePolicy
from hotswap.core.interfaces.speculator import Speculator
from hotswap.core.testing.attention import AttentionSuite
from hotswap.core.testing.checkpoints import MIXTRAL
from hotswap.core.testing.deployment import DeploymentSuite
from hotswap.core.testing.executor import ExecutorSuite
from hotswap.core.testing.launcher import LauncherSuite
from hotswap.core.testing.model import ModelSuite
from hotswap.core.testing.observer import ObserverSuite
from hotswap.core.testing.operators import OperatorsSuite
from hotswap.core.testing.queue_policy import QueuePolicySuite
from hotswap.core.testing.rig import build
from hotswap.core.testing.shard import ShardStrategySuite
from hotswap.core.testing.speculator import SpeculatorSuite


class TestFirstComeFirstServed(QueuePolicySuite):
    machine_examples = 5

    def make_policy(self) -> QueuePolicy:
        return build("queue_policy", "fcfs")


class TestPriority(TestFirstComeFirstServed):
    def make_policy(self) -> QueuePolicy:
        return build("queue_policy", "priority")


class TestShortestFirst(TestFirstComeFirstServed):
    def make_policy(self) -> QueuePolicy:
        return build("queue_policy", "shortest_first")


class TestLongestPrefixFirst(TestFirstComeFirstServed):
    kv = "prefix"

    def make_policy(self) -> QueuePolicy:
        return build("queue_policy", "longest_prefix_first", max_overtaken=3)


class TestFairShare(TestFirstComeFirstServed):
    def make_policy(self) -> QueuePolicy:
        return build("queue_policy", "fair_share")


class TestTorch(AttentionSuite):
    def make_backend(self) -> AttentionBackend:
        return build("attention", "torch")


class TestComposite(AttentionSuite):
    def make_backend(self) -> AttentionBackend:
        return build("attention", "composite", prefill="torch", decode="torch")


class TestNgram(SpeculatorSuite):
    def make_speculator(self) -> Speculator:
        return build("speculator", "ngram", min_n=1)


class TestNoSpeculator(SpeculatorSuite):
    def make_speculator(self) -> Speculator:
        return build("speculator", "none")


class TestLlama(ModelSuite):
    def make_model(self) -> Model:
        return build("model", "LlamaForCausalLM")


class TestMixtral(ModelSuite):
    config = MIXTRAL

    def make_model(self) -> Model:
        return build("model", "MixtralForCausalLM")


class TestFallback(ModelSuite):
    def make_model(self) -> Model:
        return build("model", "transformers")


class TestTorchOperators(OperatorsSuite):
    def make_operators(self) -> Operators:
        return build("operators", "torch")


class TestInline(ExecutorSuite):
    def make_executor(self) -> Executor:
        return build("executor", "inline")


@pytest.mark.whole
class TestProcesses(ExecutorSuite):
    """Only with ``--whole``: each test starts two interpreters with torch. ``tests/parallel`` has them in every run."""

    def make_executor(self) -> Executor:
        return build("executor", "processes")


class TestLocal(LauncherSuite):
    def make_launcher(self) -> Launcher:
        return build("launcher", "local")


class TestTensor(ShardStrategySuite):
    def make_strategy(self) -> ShardStrategy:
        return build("shard", "tensor", size=2)


class TestTensorOfMoreRanksThanKeyHeads(ShardStrategySuite):
    def make_strategy(self) -> ShardStrategy:
        return build("shard", "tensor", size=4)


class TestPipeline(ShardStrategySuite):
    def make_strategy(self) -> ShardStrategy:
        return build("shard", "pipeline", size=3)


class TestPipelineOfTensor(ShardStrategySuite):
    inner = RankPlan((MeshDim("tensor", 2, ("heads", "kv_heads", "mlp", "vocab")),))

    def make_strategy(self) -> ShardStrategy:
        return build("shard", "pipeline", size=2)


class TestExpertOnTensor(ShardStrategySuite):
    config = MIXTRAL
    inner = RankPlan((MeshDim("tensor", 2, ("heads", "kv_heads", "expert_mlp", "vocab")),))

    def make_strategy(self) -> ShardStrategy:
        return build("shard", "expert")


class TestExpertOverEngines(ShardStrategySuite):
    config = MIXTRAL

    def make_strategy(self) -> ShardStrategy:
        return build("shard", "expert")


class TestData(DeploymentSuite):
    def make_deployment(self) -> Deployment:
        return build("deployment", "data", replicas=3)


class TestDisaggregated(DeploymentSuite):
    def make_deployment(self) -> Deployment:
        return build("deployment", "disaggregated", prefill=2, decode=2)


class TestMetrics(ObserverSuite):
    def make_observer(self) -> Observer:
        return build("observer", "metrics")


class TestBill(ObserverSuite):
    def make_observer(self) -> Observer:
        return build("observer", "bill")


class TestDecisionLog(ObserverSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = str(tmp_path / "log.jsonl")

    def make_observer(self) -> Observer:
        return build("observer", "decision_log", path=self.path)
