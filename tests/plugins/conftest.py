"""Distributions that exist only for a test: metadata and modules in a folder on ``sys.path``."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Install = Callable[..., Path]

PARTS = """
    from typing import Annotated
    from hotswap.core.hooks import Observer
    from hotswap.core.interfaces.attention import AttentionBackend, AttentionSupport
    from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part, Requirement
    from hotswap.core.interfaces.kv_transfer import KVTransfer
    from hotswap.core.interfaces.kvcache import KVCacheManager
    from hotswap.core.interfaces.logits import LogitsProcessor
    from hotswap.core.interfaces.deployment import Deployment, Role
    from hotswap.core.interfaces.parallel import Executor, ShardStrategy
    from hotswap.core.interfaces.scheduler import QueuePolicy, Scheduler
    from hotswap.core.interfaces.speculator import Speculator, SpeculatorNeeds

    def concrete(base, **members):
        abstract = {name: lambda self, *args, **kwargs: None for name in base.__abstractmethods__}
        return type("Fake" + base.__name__, (base,), {**abstract, **members})

    def describes(**members):
        return lambda self: Description(**members)

    class Held(ComponentOptions):
        policy: Annotated[ComponentRef, Part("queue_policy")] = ComponentRef(use="fake")

    class Draft(ComponentOptions):
        max_draft: int = 3

    needs = Requirement("kvcache", "fork", "it starts children from their parents", "kvcache.use")
    FakeScheduler = concrete(Scheduler, Options=Held)
    FakePolicy = concrete(QueuePolicy)
    Forking = concrete(QueuePolicy, describe=describes(requires=(needs,)))
    FakeKV = concrete(KVCacheManager, describe=describes(offers=frozenset({"shrink"})))
    ForkKV = concrete(KVCacheManager, describe=describes(offers=frozenset({"fork"})))
    Anywhere = concrete(AttentionBackend, support=lambda self: AttentionSupport())
    ForChip = concrete(AttentionBackend, support=lambda self: AttentionSupport(
        devices=("chip",), dtypes=("bfloat16",), head_dims=(64, 128), page_sizes=(16, 32), windows=False,
        softcap=False))
    ForCPU = concrete(AttentionBackend, support=lambda self: AttentionSupport(devices=("cpu",)))

    def no_driver(self):
        raise RuntimeError("no driver")

    WithoutDriver = concrete(AttentionBackend, support=no_driver)
    UnableExecutor = concrete(Executor, describe=no_driver)
    FakeSpeculator = concrete(
        Speculator, Options=Draft, needs=lambda self: SpeculatorNeeds(lookahead=self.options.max_draft))
    FakeExecutor = concrete(Executor)
    FakeProcessor = concrete(LogitsProcessor)
    FakeShard = concrete(ShardStrategy)
    FakeDeployment = concrete(Deployment, roles=lambda self: ())
    Carrier = concrete(KVTransfer, describe=describes(offers=frozenset({"reuse", "handoff"})))
    HandingOver = concrete(Deployment, roles=lambda self: (), describe=describes(
        requires=(Requirement("kv_transfer", "handoff", "it hands over", "kv_transfer.use"),)))

    class Sides(ComponentOptions):
        left: list[ComponentRef] = []

    WithRoles = concrete(Deployment, Options=Sides, roles=lambda self: [
        Role("left", 1, tuple(self.options.left), "left"), Role("right", 1)])
    FakeObserver = concrete(Observer)
"""
POINTS: dict[str, dict[str, str]] = {
    "hotswap.scheduler": {"fake": "parts:FakeScheduler"},
    "hotswap.queue_policy": {"fake": "parts:FakePolicy", "forking": "parts:Forking"},
    "hotswap.kvcache": {"fake": "parts:FakeKV", "forkable": "parts:ForkKV"},
    "hotswap.attention": {"fake": "parts:Anywhere", "chip": "parts:ForChip"},
    "hotswap.speculator": {"fake": "parts:FakeSpeculator"},
    "hotswap.kv_transfer": {"carrier": "parts:Carrier"},
    "hotswap.executor": {"fake": "parts:FakeExecutor"},
    "hotswap.logits_processor": {"fake": "parts:FakeProcessor", "second": "parts:FakeProcessor"},
    "hotswap.shard": {"fake": "parts:FakeShard"},
    "hotswap.deployment": {
        "copies": "parts:FakeDeployment", "roles": "parts:WithRoles", "handing": "parts:HandingOver"},
    "hotswap.observer": {"fake": "parts:FakeObserver"},
}
BASE: dict[str, Any] = {
    "model": "m", "scheduler": "fake", "kvcache": "fake", "attention": "fake", "speculator": "fake",
    "execution": "fake", "logits_processors": ["fake"], "observers": ["fake"],
}


def write_distribution(
    site: Path, name: str, entry_points: dict[str, dict[str, str]], source: str = "", version: str = "1.0",
) -> Path:
    """Write what pip would leave of a distribution with one module, ``name`` with underscores."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    module = site / f"{name.replace('-', '_')}.py"
    module.write_text(textwrap.dedent(source))
    return module


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, entry_points, source)`` makes a distribution importable for the test."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules = set(sys.modules)
    yield lambda *args, **kwargs: write_distribution(site, *args, **kwargs)
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(site) in str(sys.modules[name].__file__):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def parts(install: Install) -> dict[str, Any]:
    """A distribution with a component of most kinds, and a config that names them."""
    install("parts", POINTS, PARTS)
    return dict(BASE)
