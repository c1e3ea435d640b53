"""What every model must do. The whole test file of a model::

    class TestMine(ModelSuite):
        def make_model(self):
            return MyModel()

By default it is given a tiny checkpoint of the Llama family. Another family overrides ``write``, with
``transformers_checkpoint(folder, "SomeForCausalLM")`` where transformers knows it; what it is compared with is
transformers' implementation of the checkpoint's architecture, unless ``reference`` says otherwise.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.errors import ModelLoadError
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.parallel import MeshDim, RankPlan
from hotswap.core.interfaces.quantization import (
    PACKED_WEIGHTS,
    LinearWeight,
    Packed,
    Quantization,
    QuantizationSupport,
)
from hotswap.core.modeling.checkpoint import Checkpoint, open_checkpoint
from hotswap.core.modeling.linear import DenseLinear
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.core.modeling.packing import layer_names
from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint
from hotswap.core.testing.dense import PlainAttention, ThreadMesh, loaded, logits_of, on_ranks

IDS = [3, 9, 4, 9, 2, 7, 7, 1, 12, 5, 8, 8, 0, 11, 3, 9]


class _Listing(Quantization):
    """Packs nothing; keeps the names of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def support(self) -> QuantizationSupport:
        return QuantizationSupport()

    def pack(self, weight: LinearWeight) -> Packed:
        self.names += weight.names
        return DenseLinear(weight)


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
        if facts.attention:
            needed = set(model.attention_shapes({}).values())
            assert set(facts.attention) == needed, f"the facts say {facts.attention}, its layers need {needed}"
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

    def test_some_tokens_hidden_states_are_those_that_all_have(self, checkpoint: Checkpoint) -> None:
        model, inputs = loaded(self.make_model(), checkpoint), (torch.tensor(IDS), torch.arange(len(IDS)))
        with torch.inference_mode():
            everything = model.forward(*inputs, PlainAttention(model))
            for wanted in ([len(IDS) - 1], [0, 3, 4], list(range(len(IDS)))):
                some = model.forward_some(*inputs, PlainAttention(model), torch.tensor(wanted))
                torch.testing.assert_close(some, everything[wanted], atol=1e-5, rtol=1e-5)

    def test_engines_of_one_process_may_share_it_where_its_facts_say_so(self, checkpoint: Checkpoint) -> None:
        """Two threads compute at the same time, each layer together; other tokens, at other positions."""
        if not self.make_model().facts(checkpoint.config).concurrent:
            pytest.skip("its facts do not say 'concurrent'")
        model, meeting = loaded(self.make_model(), checkpoint), threading.Barrier(2, timeout=60)
        parts = [(IDS[:6], 0), (IDS[6:12], 3)]

        def compute(part: tuple[list[int], int], meet: bool) -> torch.Tensor:
            plain, (ids, start) = PlainAttention(model), part

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                if meet:
                    meeting.wait()
                return plain(layer, q, k, v)

            try:
                with torch.inference_mode():
                    return model.head(model.forward(
                        torch.tensor(ids), torch.arange(start, start + len(ids)), attend))
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(lambda part: compute(part, True), parts))
        for part, found in zip(parts, together, strict=True):
            torch.testing.assert_close(
                found, compute(part, False), atol=1e-5, rtol=0,
                msg=lambda told: f"two threads that compute at the same time disturb each other: {told}")

    def test_hidden_states_are_those_that_their_names_say(self, checkpoint: Checkpoint) -> None:
        model, ids = loaded(self.make_model(), checkpoint), torch.tensor(IDS)
        names, facts = model.taps(), model.facts(checkpoint.config)
        if not names:
            pytest.skip("it gives no hidden states to speculators")
        taps: dict[str, torch.Tensor | None] = dict.fromkeys(names)
        with torch.inference_mode():
            x = model.forward(ids, torch.arange(len(IDS)), PlainAttention(model), taps)
            logits = model.head(x)
            same = {"embedding": model.embed(ids), f"layer:{facts.num_layers - 1}": x}
            assert torch.equal(logits, logits_of(model, IDS)), "asked for hidden states, it gives other logits"
            for name, state in taps.items():
                assert state is not None and state.shape == (len(IDS), facts.hidden_size), f"{name} is {state}"
                assert torch.allclose(state, same.get(name, state), atol=1e-6), f"{name} is not what its name says"
            final = taps.get("final")
            shared = model.unembed(x if final is None else final)
        assert shared.dtype == torch.float32 and shared.shape == logits.shape
        if final is not None:
            torch.testing.assert_close(shared, logits, atol=1e-5, rtol=0)

    def test_it_lists_the_layers_that_a_quantization_is_given(self, checkpoint: Checkpoint) -> None:
        """A name that is missing cannot stand in a config, one too many would be without effect there."""
        model, listing = self.make_model(), _Listing()
        if PACKED_WEIGHTS not in model.describe().offers:
            pytest.skip("its layers are not packed")
        listed = layer_names(checkpoint, model)
        model.build(checkpoint.config, LOCAL_MESH, torch.float32, "cpu")
        with checkpoint.weights() as weights:
            weights.quantization = listing
            model.load(weights)
        assert sorted(listed) == sorted(listing.names), f"it lists {listed}, and gives {listing.names}"

    def test_sharded_over_ranks_it_gives_the_same(self, checkpoint: Checkpoint) -> None:
        """Over the axes that its facts name: a reduce that is missing, or one too many, shows here."""
        facts, expected = self.make_model().facts(checkpoint.config), logits_of(
            loaded(self.make_model(), checkpoint), IDS)
        heads = tuple(axis for axis in ("heads", "kv_heads") if axis in facts.axes)
        sharded = [axes for axes in (heads, ("mlp",), ("vocab",), ("expert",), ("expert_mlp",))
                   if axes and set(axes) <= facts.axes.keys()]
        if not sharded:
            pytest.skip("its facts name no axis")
        for axes in sharded:
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
