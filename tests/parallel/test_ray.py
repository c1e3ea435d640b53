"""The ray launcher, on a real cluster of two nodes on this machine."""

import contextlib
import os
import queue
import subprocess
import sys
import time

import pytest

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore"),  # Ray's own, of which there are many
]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of two CPUs at 127.0.0.1: two raylets, one control store."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # 127.0.0.1 stays what it is, as on those systems
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        made.add_node(**node)
        yield made
        ray.shutdown()
        made.shutdown()


@contextlib.contextmanager
def joined(cluster):
    """This process belongs to the cluster, whatever launchers do."""
    ray.init(address=cluster.address)
    yield
    ray.shutdown()


def launcher(address, **options):
    return {"use": "ray", "address": address, "strategy": "STRICT_SPREAD", **options}


def test_ranks_on_two_nodes_compute_what_one_device_does_and_a_dead_node_ends_the_engine(
        cluster, tmp_path_factory, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from hotswap.core.config import load_config
    from hotswap.core.engine.build import build_engine
    from hotswap.core.request import Request, SamplingParams

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4, bos_token_id=0,
        eos_token_id=1)).eval()
    model.save_pretrained(tmp_path)
    config = {
        "model": {"path": str(tmp_path)}, "dtype": "float32", "device": "cpu", "max_model_len": 64, "observers": [],
        "kvcache": {"num_blocks": 40}, "execution": {"num_threads": 1},
        "parallel": [{"use": "tensor", "size": 2}]}

    def generate(built, count):
        outputs = queue.SimpleQueue()
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        built.engine.add(Request("r", [5, 9, 3, 70, 8], sampling), outputs.put)
        tokens = []
        while True:
            output = outputs.get(timeout=60)
            tokens += output.token_ids
            if output.finish_reason:
                return tokens, output

    alone = build_engine(load_config({**config, "parallel": []}, environ={}), progress=False)
    expected, _ = generate(alone, 16)
    alone.engine.stop()
    config["execution"]["launcher"] = launcher(cluster.address)
    built = build_engine(load_config(config, environ={}), progress=False)
    try:
        assert generate(built, 16)[0] == expected
        actors = built.engine.loop.parts.executor.parts["launcher"]._actors
        placed = ray.util.placement_group_table()
        (group,) = [entry for entry in placed.values() if entry["state"] == "CREATED"]
        assert len(set(group["bundles_to_node_id"].values())) == len(actors) == 2
        ray.kill(actors[1])
        end = time.monotonic() + 5
        while built.engine.failure is None:
            assert time.monotonic() < end, built.engine.health()
            time.sleep(0.02)
        assert "rank 1" in built.engine.health()
        with pytest.raises(EngineStoppedError, match="rank 1"):
            generate(built, 4)
    finally:
        built.engine.stop()
    assert not ray.is_initialized(), "the connection that the launcher made goes with it"
    with joined(cluster):  # and the cluster stays
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        table = ray.util.placement_group_table()
    assert all(entry["state"] == "REMOVED" for entry in table.values())


def test_a_connection_that_others_made_stays_when_the_launchers_go(cluster):
    first, second = (
        Registry().build("launcher", ComponentRef(**launcher(cluster.address)), "execution") for _ in range(2))
    with joined(cluster):
        first.host()
        first.stop(1)
        first.stop(1)
        assert ray.is_initialized()
    first.host()
    second.host()
    first.stop(1)
    assert ray.is_initialized(), "the other one still needs it"
    second.stop(1)
    assert not ray.is_initialized()


def test_a_cluster_without_room_is_refused_with_what_it_has(cluster):
    crowded = ComponentRef(**launcher(cluster.address, cpus=3, timeout_s=0.5))
    built = Registry().build("launcher", crowded, "execution")
    with pytest.raises(ConfigError, match="no room for 2 ranks of 3 CPUs"):
        built.start("no:where", [{}, {}])
    built.stop(1)


MISSING = """
import sys
sys.modules["ray"] = None
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry
Registry().build("launcher", ComponentRef(use="ray"), "execution.launcher").host()
"""


def test_without_ray_the_message_names_the_extra():
    run = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert "ConfigError: execution.launcher: launcher:ray needs Ray" in run.stderr
    assert "pip install 'hotswap[ray]'" in run.stderr
