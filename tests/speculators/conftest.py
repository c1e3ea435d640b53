"""Small checkpoints: targets, draft models, and heads that were never trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}


def _random(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.1 * noise if "norm" in name else noise * 1.5 / shape[-1] ** 0.5


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``make_model(seed, noise, **sizes)``: a Llama with random weights; with ``noise`` on them it often says what the
    one of the same seed without noise says."""

    def make(seed: int = 1, noise: float = 0.0, **sizes: Any) -> Path:
        import transformers

        config = transformers.LlamaConfig(**SIZES | sizes, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
        own, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_random(parameter.shape, name, own))
                parameter += noise * torch.randn(parameter.shape, generator=other)
        path = tmp_path_factory.mktemp("model")
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``make_head(kind, drop, put, **config)``: an untrained head as the published checkpoints are laid out; ``config``
    changes its config.json, ``drop`` leaves tensors out, ``put`` replaces some."""

    def make(kind: str, drop: tuple[str, ...] = (), put: dict[str, Any] | None = None, **config: Any) -> Path:
        from safetensors.torch import save_file

        entries = SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "rms_norm_eps": 1e-6} | config
        h, m = SIZES["hidden_size"], SIZES["intermediate_size"]
        prefix, width = ("layers.0.", h) if kind == "eagle" else ("midlayer.", 2 * h)
        shapes = {
            f"{prefix}self_attn.q_proj": (32, width), f"{prefix}self_attn.k_proj": (16, width),
            f"{prefix}self_attn.v_proj": (16, width), f"{prefix}self_attn.o_proj": (h, 32),
            f"{prefix}mlp.gate_proj": (m, h), f"{prefix}mlp.up_proj": (m, h), f"{prefix}mlp.down_proj": (h, m),
            f"{prefix}post_attention_layernorm": (h,), "embed_tokens": (SIZES["vocab_size"], h),
        }
        tensors: dict[str, torch.Tensor] = {}
        if kind == "eagle":
            shapes |= {"fc": (h, 2 * h)}
            tensors["fc.bias"] = torch.zeros(h)
        else:
            shapes |= {
                "fc": (h, 3 * h), "norm": (h,), "lm_head": (12, h), f"{prefix}hidden_norm": (h,),
                f"{prefix}input_layernorm": (h,)}
            entries = {
                "draft_vocab_size": 12, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, **entries,
                "architectures": ["LlamaForCausalLMEagle3"]}
            # The draft vocabulary leaves out tokens 0, 1, 2 and 9.
            tensors["d2t"] = torch.tensor([3] * 6 + [4] * 6)
            tensors["t2d"] = torch.zeros(SIZES["vocab_size"], dtype=torch.bool)
        generator = torch.Generator().manual_seed(4)
        for name, shape in shapes.items():
            tensors[f"{name}.weight"] = _random(shape, name, generator)
        tensors |= put or {}
        path = tmp_path_factory.mktemp(kind)
        save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(entries))
        return path

    return make


@pytest.fixture(scope="session")
def target_path(make_model: Any) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def load_target() -> Any:
    """``load_target(path)``: the kit's ``Target``, loaded."""
    from hotswap.core.execution.worker import model_for
    from hotswap.core.modeling.checkpoint import open_checkpoint
    from hotswap.core.modeling.mesh import LOCAL_MESH
    from hotswap.core.testing.speculator import Target

    def load(path: Path) -> Target:
        checkpoint = open_checkpoint(str(path), progress=False)
        model = model_for(checkpoint)
        model.build(checkpoint.config, LOCAL_MESH, torch.float32, "cpu")
        with checkpoint.weights() as weights:
            model.load(weights)
        return Target(model, checkpoint)

    return load


@pytest.fixture(scope="session")
def make_worker() -> Any:
    """``make_worker(path, speculator, **settings)``: a loaded worker with pages for 300 requests."""
    from hotswap.core.execution.builder import WorkerBuilder
    from hotswap.core.execution.settings import WorkerSettings
    from hotswap.core.execution.worker import model_for
    from hotswap.core.interfaces.kvcache import CachePlan, GroupPlan
    from hotswap.core.interfaces.parallel import RankPlan
    from hotswap.core.modeling.checkpoint import open_checkpoint
    from hotswap.plugins.attention.torch_sdpa import TorchAttention
    from hotswap.plugins.logits_processors.bad_words import BadWords
    from hotswap.plugins.logits_processors.bias import Bias
    from hotswap.plugins.logits_processors.min_tokens import MinTokens
    from hotswap.plugins.logits_processors.penalties import Penalties

    def make(path: Path, speculator: Any, **settings: Any) -> Any:
        checkpoint = open_checkpoint(str(path), progress=False)
        defaults = {
            "dtype": "float32", "device": "cpu", "max_model_len": 48, "max_batch_tokens": 4096, "max_running": 300}
        worker = WorkerBuilder(
            checkpoint, model_for(checkpoint), TorchAttention(), speculator,
            [Penalties(), Bias(), BadWords(), MinTokens()], WorkerSettings(**defaults | settings))(RankPlan(), 0)
        worker.allocate(CachePlan({spec.group: GroupPlan(301, 16) for spec in worker.info().cache_specs}))
        return worker

    return make
