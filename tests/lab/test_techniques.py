"""The experiments of the technique table, on a tiny model and for a moment: each tells all that it is about."""

from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from hotswap.core.config.files import read_file
from hotswap.lab.report import read_result
from hotswap.server.cli import main

FOLDER = Path(__file__).parents[2] / "examples" / "techniques"
ONE_SIDED = {"acceptance_length"}
"""Only one of two arms has any."""


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """The quickstart's config with a tiny model of the quickstart's context."""
    path = tmp_path_factory.mktemp("models") / "long"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096)).save_pretrained(path)
    (path / "tokenizer.json").write_text((tiny / "tokenizer.json").read_text())
    values = read_file(FOLDER.parent / "quickstart.yaml")
    values |= {"model": {"path": str(path)}, "dtype": "float32", "attention": "torch"}
    values["kvcache"] |= {"memory": "32MiB"}
    values["execution"] |= {"num_threads": 1}
    return values


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_of_the_technique_table_tells_every_metric_that_it_is_about(file, base, tmp_path):
    values = read_file(file) | {"base": base, "pairs": 2, "warm_up": 1}
    values["load"] = {"rate": 300} if "rate" in values["load"] else values["load"]
    values["block"] = {"requests": 3 + values["load"].get("concurrency", 6)}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(values))
    done = CliRunner().invoke(main, ["ab", str(tmp_path / "experiment.yaml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    result = read_result(tmp_path / "out" / "result.json")
    assert not result.partial and "failed: none" in done.output and "HTTP" not in done.output
    for arm, pairs in result.pairs.items():
        for metric in values["metrics"]:
            told = [metric in pair.arm for pair in pairs]
            assert all(told), f"{arm} does not tell its {metric}"
            assert metric in ONE_SIDED or all(metric in pair.base for pair in pairs)
    assert result.divergences == [] and all(result.outputs_compared[arm] for arm in result.pairs)
    effects = {(found.arm, found.metric): found for found in result.comparisons}
    expected = {
        "1_continuous_batching": lambda: effects["continuous", "batch_size"].effect > 0,
        "3_paged_kv": lambda: effects["paged", "kv_waste"].effect < -0.5 and effects["paged", "batch_size"].effect > 0,
        "4_prefix_cache": lambda: min(effects[arm, "hit_rate"].effect for arm in ("prefix", "radix")) > 0.3,
        "5_speculation": lambda: all(pair.arm["acceptance_length"] > 1 for pair in result.pairs["ngram"]),
    }
    assert expected.get(file.stem, lambda: True)()
