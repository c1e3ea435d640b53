"""The machine's ceilings, and a step split into its parts."""

import json

import pytest
import torch

from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import ConfigError
from hotswap.core.testing.checkpoints import tiny_checkpoint

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
           "num_hidden_layers": 30, "vocab_size": 49152}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A file for a model that is small enough to be run."""
    folder = tmp_path_factory.mktemp("model")
    file = folder / "config.json"
    file.write_text(json.dumps({
        "model": str(tiny_checkpoint(folder / "tiny")), "dtype": "float32", "device": "cpu", "max_model_len": 64,
        "scheduler": {"max_running": 4, "max_batch_tokens": 16}, "kvcache": {"memory": "16MiB"}}))
    return file


def test_the_linear_layers_of_a_model_are_told_by_its_config():
    from benchmarks.cpu.ceilings import Shapes

    shapes = Shapes.of(SMOLLM2)
    assert shapes.layer[0] == (960, 576) and shapes.parameters == 106_168_320 + 28_311_552


@pytest.mark.parametrize(("name", "tolerance"), [
    ("fp32", 1e-5), ("bf16", 0.01), ("bf16 packed", 0.01), ("int8", 0.03), ("int4", 0.2)])
def test_every_operator_computes_the_product_that_it_is_timed_for(name, tolerance):
    from benchmarks.cpu.ceilings import OPERATORS

    torch.manual_seed(0)
    dtype, pack = OPERATORS[name]
    weight, x = torch.randn(64, 96).to(dtype), torch.randn(3, 96).to(dtype)
    try:
        found = pack(weight)(x).float()
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"not on this processor: {error}")
    wanted = x.float() @ weight.float().T
    assert (found - wanted).norm() / wanted.norm() < tolerance


def test_ceilings_tell_an_operator_that_there_is_not(config, monkeypatch):
    from benchmarks.cpu import ceilings

    def absent(weight):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(ceilings, "OPERATORS", {"fp32": ceilings.OPERATORS["fp32"], "int8": (torch.bfloat16, absent)})
    monkeypatch.setattr(ceilings, "GEMM_SIZE", 32)
    found = ceilings.measured(config, [1, 3], threads=1, quick=True)
    assert found["read_gb_s"] > 0 and found["linear_ms"]["fp32"]["3"]["median"] > 0
    text = ceilings.told(found)
    assert "int8: not here, since no such instruction" in text and "| 3 | " in text


def test_parts_add_up_to_the_time_between_two_steps():
    from benchmarks.cpu.steps import PARTS, split

    told = {"prepare": 0.002, "propose": 0.0, "forward": 0.010, "sample": 0.004, "observe": 0.001}
    timed = {"linear": 0.006, "attention": 0.003, "head": 0.003, "plan": 0.001}
    parts = split([told] * 3, [timed] * 3, [0.0, 0.02, 0.04, 0.06])
    assert parts == pytest.approx(dict(zip(PARTS, (9, 4, 1, 1, 2, 3), strict=True)))


def test_the_floor_is_the_larger_of_reading_and_computing():
    from benchmarks.cpu.steps import Floor

    floor = Floor(token_bytes=1000, parameters=10_000_000, read_gb_s=40, gemm_gflop_s=100)
    few, many = floor.at(1, 1000, 40_000_000), floor.at(100, 1000, 40_000_000)
    assert few["weights_ms"] == pytest.approx(1) and few["floor_ms"] == pytest.approx(1 + 0.025)
    assert many["floor_ms"] == many["compute_ms"] == pytest.approx(20)


def test_a_step_of_a_real_engine_is_split_and_the_engine_left_as_it_was(config):
    from benchmarks.cpu.steps import LINEAR, profiled, told

    before = [kind.__call__ for kind in LINEAR]
    found = profiled(config, [], [1, 3], context=8, server=False, quick=True)
    for rows in ("1", "3"):
        parts = found["rows"][rows]["parts_ms"]
        assert all(parts[name] > 0 for name in ("linear layers", "attention", "other operators", "sampling"))
        weights = 1e9 * found["read_gb_s"] * found["rows"][rows]["weights_ms"] / 1e3
        assert weights == pytest.approx(4 * (16 * 32 + 3 * (64 * 32 + 32 * 32 + 3 * 48 * 32)))
    assert [kind.__call__ for kind in LINEAR] == before
    assert "| **a step** |" in told(found)


@pytest.mark.parametrize(("rows", "context", "path"), [(5, 8, "--rows"), (2, 60, "--context")])
def test_what_cannot_decode_together_is_refused(config, rows, context, path):
    from benchmarks.cpu.steps import _requests

    built = build_engine(load_config(config), progress=False)
    try:
        with pytest.raises(ConfigError, match=path):
            _requests(built, rows, context, 4)
    finally:
        built.engine.stop()
