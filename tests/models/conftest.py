import importlib.util
from pathlib import Path

import pytest
import torch


def _beside(name):
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"models_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference():
    return _beside("reference")


@pytest.fixture(scope="session")
def threads():
    """``threads.on_ranks(size, axes, work)``: the results of ``work(mesh)`` on ranks that share ``axes``."""
    return _beside("threads")


@pytest.fixture
def make_checkpoint(tmp_path):
    """Save a tiny random transformers model of a family; returns it and its directory."""

    def make(family="Llama", seed=0, save=None, **config):
        import transformers

        base = {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        }
        config = getattr(transformers, f"{family}Config")(**base | config, attn_implementation="eager")
        config._experts_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(1 + noise if "norm" in name else noise)
        directory = tmp_path / f"{family}-{seed}"
        model.save_pretrained(directory, **save or {})
        return model, directory

    return make


@pytest.fixture
def ids():
    return torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
