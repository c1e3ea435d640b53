"""What every model must do. The whole test file of a model::

    class TestMine(ModelSuite):
        def make_model(self):
            return MyModel()

By default it is given a tiny checkpoint of the Llama family. Another family sets ``config`` and ``write``; what it is
compared with is transformers' implementation of the checkpoint's architecture, unless ``reference`` says otherwise.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.errors import ModelLoadError
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.parallel import MeshDim, RankPlan
from hotswap.core.modeling.checkpoint import Checkpoint, open_checkpoint
from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint
from hotswap.core.testing.dense import PlainAttention, ThreadMesh, loaded, logits_of, on_ranks

IDS = [3, 9, 4, 9, 2, 7, 7, 1, 12, 5, 8, 8, 0, 11, 3, 9]


class ModelSuite:
    """Subclass it and provide ``make_model``."""

    config: dict[str, Any] = LLAMA
    tolerance = 1e-4
    """Greatest difference of a logit in float32."""

    def make_model(self) -> Model:
        raise NotImplementedError("return a new instance of the model under test, neither built nor loaded")

    def write(self, folder: Path) -> None:
        """A tiny checkpoint of the family."""
        tiny_checkpoint(folder, self.config)

    def reference(self, folder: Path) -> torch.Tensor:
        """The logits [T, V] of ``IDS``."""
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([IDS])).logits[0].float()
        return logits

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        self.write(tmp_path / "model")
        return open_checkpoint(str(tmp_path / "model"), progress=False)

    def test_its_facts_come_from_the_config_alone_and_agree_with_what_it_builds(self, checkpoint: Checkpoint) -> None:
        facts = self.make_model().facts(checkpoint.config)
        assert facts == self.make_model().facts(json.loads(json.dumps(checkpoint.config)))
        model = loaded(self.make_model(), checkpoint)
        specs = model.cache_specs()
        layers = sorted(layer for spec in specs for layer in spec.layers)
        assert layers == list(range(facts.num_layers)), f"the cache groups have the layers {layers}"
        for spec in specs:
            assert spec.bytes_per_token == 2 * len(spec.layers) * spec.kv_heads * spec.head_dim * 4, (
                f"{spec}: keys and values of {len(spec.layers)} layers in float32 take another number of bytes")
            assert model.attention_shapes({spec.group: 16})[spec.group].page_size == 16
        assert logits_of(model, IDS).shape == (len(IDS), facts.vocab_size)

    def test_it_gives_the_reference_s_logits_whole_and_in_chunks(self, checkpoint: Checkpoint) -> None:
        model, expected = loaded(self.make_model(), checkpoint), self.reference(checkpoint.path)
        assert expected.abs().max() > 0.5, "logits this small prove nothing"
        for chunks in (None, [1, 7, 1, 7]):
            found = logits_of(model, IDS, chunks)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    def test_a_later_token_changes_no_earlier_logits(self, checkpoint: Checkpoint) -> None:
        model = loaded(self.make_model(), checkpoint)
        changed = [*IDS[:-1], (IDS[-1] + 1) % 16]
        torch.testing.assert_close(logits_of(model, IDS)[:-1], logits_of(model, changed)[:-1], atol=1e-6, rtol=0)

    def test_a_row_does_not_depend_on_its_neighbours_in_the_step(self, checkpoint: Checkpoint) -> None:
        """Two sequences in one call, each attended by itself, at positions of their own."""
        model, parts = loaded(self.make_model(), checkpoint), (IDS[:6], IDS[6:10])
        each = [PlainAttention(model) for _ in parts]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = [slice(0, 6), slice(6, 10)]
            return torch.cat([one(layer, q[r], k[r], v[r]) for one, r in zip(each, rows, strict=True)])

        with torch.inference_mode():
            positions = torch.cat([torch.arange(len(part)) for part in parts])
            together = model.head(model.forward(torch.tensor([*parts[0], *parts[1]]), positions, attend))
        alone = torch.cat([logits_of(model, part) for part in parts])
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)

    def test_sharded_over_ranks_it_gives_the_same(self, checkpoint: Checkpoint) -> None:
        """Over the axes that its facts name: a reduce that is missing, or one too many, shows here."""
        facts, expected = self.make_model().facts(checkpoint.config), logits_of(
            loaded(self.make_model(), checkpoint), IDS)
        heads = tuple(axis for axis in ("heads", "kv_heads") if axis in facts.axes)
        for axes in (heads, ("mlp",), ("vocab",)):
            if not axes or not set(axes) <= facts.axes.keys():
                continue

            def run(mesh: ThreadMesh) -> torch.Tensor:
                return logits_of(loaded(self.make_model(), checkpoint, mesh), IDS, mesh=mesh)

            for logits in on_ranks(RankPlan((MeshDim("two", 2, axes),)), run):
                error = (logits - expected).abs().max()
                assert error <= self.tolerance, f"two ranks that share {axes} differ from one by {error:.3g}"

    @pytest.mark.parametrize("fault", ["missing", "unexpected", "misshaped"])
    def test_a_damaged_checkpoint_is_refused_with_the_tensor_s_name(self, tmp_path: Path, fault: str) -> None:
        from safetensors.torch import load_file, save_file

        folder = tmp_path / "damaged"
        self.write(folder)
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        name = next(name for name in sorted(tensors) if tensors[name].dim() == 2 and "layers" in name)
        if fault == "unexpected":
            tensors["model.layers.0.extra.weight"], name = torch.zeros(2), "extra"
        elif fault == "missing":
            del tensors[name]
        else:
            tensors[name] = torch.zeros(3, 3)
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=name):
            loaded(self.make_model(), open_checkpoint(str(folder), progress=False))
