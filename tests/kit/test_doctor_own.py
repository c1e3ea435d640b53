"""``hotswap plugins doctor`` finds nothing wrong with hotswap's own parts: a sample in every run, all of them with
``--whole``."""

import json

import pytest
import torch

from hotswap.core.registry import Registry
from hotswap.core.testing.checkpoints import tiny_checkpoint
from hotswap.server.commands.doctor import Health, Patient, examine

REGISTRY = Registry()
OWN = [entry for entry in REGISTRY.entries if entry.ours]
SAMPLE = {"router:round_robin", "eviction_policy:lru", "shard:expert"}
GIVEN = {
    "attention:composite": {"prefill": "torch", "decode": "torch"}, "deployment:data": {"replicas": 3},
    "shard:tensor": {"size": 2}, "shard:pipeline": {"size": 3},
}
"""What must be told, by component."""

BLOCKS = [{"timestamp": n, "input_length": 48, "output_length": 9, "chat_id": n, "hash_ids": [n % 2, 10 + n, 70 + n]}
          for n in range(20)]
TRACES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:{second}.0,{second},9\n" for second in range(30, 50)),
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
        f"{n},ChatGPT,{40 + n},9,0,Conversation log\n" for n in range(20)),
    "bailian": "".join(f"{json.dumps(block)}\n" for block in BLOCKS),
    "mooncake": "".join(f"{json.dumps(block | {'input_length': 3 * 512})}\n" for block in BLOCKS),
    "prompts": "".join(f"{json.dumps({'tokens': [n, 2, 3]})}\n" for n in range(20)),
}
NOT_OK = {
    ("attention:flash", "kit"): Health.OK if torch.cuda.is_available() else Health.SKIPPED,
    ("speculator:eagle", "options"): Health.SKIPPED,  # it must be given a head: tests/speculators makes some
    ("kv_transfer:none", "kit"): Health.SKIPPED,  # it offers nothing
    ("model:transformers", "import"): Health.WARNING,  # whoever chooses it wants transformers
}


@pytest.fixture
def options(tmp_path):
    """``options("observer:decision_log")``"""

    def of(name):
        kind, _, bare = name.partition(":")
        if kind == "workload" and bare in TRACES:
            (tmp_path / "trace").write_text(TRACES[bare])
            return {"path": str(tmp_path / "trace")}
        if name == "speculator:draft":
            return {"model": str(tiny_checkpoint(tmp_path / "draft", seed=2))}
        if name == "observer:decision_log":
            return {"path": str(tmp_path / "log.jsonl")}
        return GIVEN.get(name, {})

    return of


@pytest.mark.parametrize(("name", "entry"), [
    pytest.param(
        name := f"{entry.kind}:{entry.name}", entry, id=name, marks=() if name in SAMPLE else pytest.mark.whole)
    for entry in OWN])
def test_our_own_parts_are_well(name, entry, options):
    for finding in examine(Patient(entry, REGISTRY, options(name))):
        assert finding.health is NOT_OK.get((name, finding.check), Health.OK), finding
