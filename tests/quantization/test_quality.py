"""The tool that measures quality computes what it says."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from hotswap.core.registry import Registry

PATH = Path(__file__).parents[2] / "benchmarks" / "cpu" / "quality.py"


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("measured_quality", PATH)
    module = sys.modules["measured_quality"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_scores_are_perplexity_divergence_and_agreement(quality):
    """Two windows of two tokens, of which the second is predicted each time."""
    reference = torch.tensor([[0.5, 0.25, 0.25]]).log()
    scores = quality.Scores()
    scores.add(torch.tensor([[0.25, 0.5, 0.25]]).log(), reference, reference.exp(), [0, 1])
    scores.add(reference, reference, reference.exp(), [0, 2])
    found = scores.summary()
    assert found["perplexity"] == pytest.approx(math.sqrt(2 * 4))
    assert found["kl"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert found["agreement"] == 0.5


def test_a_form_is_named_with_its_options(quality):
    built = quality.quantization('gguf:many_rows=null;keep=["*.down_proj"]', Registry())
    assert (built.options.many_rows, built.options.keep) == (None, ["*.down_proj"])


def test_the_table_holds_each_against_the_first(quality):
    rows = [{"name": name, "weight_bytes": 2e6, "perplexity": value, "kl": 0.0, "kl_p99": 0.0, "agreement": 1.0}
            for name, value in (("none", 10.0), ("int8", 10.1))]
    assert "| `int8` | 2 | 10.100 | +1.00 % |" in quality.table(rows)
