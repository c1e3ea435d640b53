"""Every tensor is accounted for: damaged, missing, unexpected or misshaped ones end the load with their names."""

import json
import re
import shutil
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from hotswap.core.errors import ModelLoadError
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.mesh import Shard
from hotswap.core.modeling.weights import SafetensorsWeights


def edit(directory, change):
    """Let ``change`` alter the tensors of a single-file checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "60KB"}], ids=["single", "sharded"])
def test_a_shard_that_was_cut_off_is_an_error_with_both_sizes(make_checkpoint, reference, save):
    _, directory = make_checkpoint(save=save)
    shard = max(directory.glob("*.safetensors"))
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1024)
    told = rf"{shard.name} is truncated: expected {size} bytes, actual {size - 1024}"
    with pytest.raises(ModelLoadError, match=told):
        reference.load_decoder(directory)


@pytest.mark.parametrize("content", [b"", b"\x01\x02", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"[]",
                                     (4).to_bytes(8, "little") + b"nope"])
def test_a_damaged_header_is_an_error_naming_the_file(make_checkpoint, reference, content):
    _, directory = make_checkpoint()
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="model.safetensors"):
        reference.load_decoder(directory)


def test_a_shard_that_is_not_there_is_named(make_checkpoint, reference):
    _, directory = make_checkpoint(save={"max_shard_size": "60KB"})
    gone = max(directory.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(ModelLoadError, match=gone.name):
        reference.load_decoder(directory)


def test_an_index_cannot_name_files_elsewhere(make_checkpoint, reference, tmp_path):
    _, directory = make_checkpoint()
    shutil.move(directory / "model.safetensors", tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="outside"):
        reference.load_decoder(directory)


def test_pickled_weights_are_refused_with_a_hint(make_checkpoint, reference):
    _, directory = make_checkpoint()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="convert them to safetensors"):
        reference.load_decoder(directory)


def test_all_missing_tensors_are_listed(make_checkpoint, reference):
    _, directory = make_checkpoint()
    gone = ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    edit(directory, lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(ModelLoadError) as error:
        reference.load_decoder(directory)
    assert all(name in str(error.value) for name in gone)


def test_a_misshaped_tensor_is_named_with_both_shapes(make_checkpoint, reference):
    _, directory = make_checkpoint()
    edit_config(directory, intermediate_size=100)
    told = r"mlp.gate_proj.weight has shape \(96, 64\), the config promises \(100, 64\)"
    with pytest.raises(ModelLoadError, match=told):
        reference.load_decoder(directory)


@pytest.mark.parametrize("name", [
    "lm_head.bias", "model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
])
def test_a_tensor_that_the_config_does_not_promise_is_refused(make_checkpoint, reference, name):
    _, directory = make_checkpoint()
    edit(directory, lambda tensors: tensors.update({name: torch.full((128,), 5.0)}))
    with pytest.raises(ModelLoadError, match=f"unexpected: {name}"):
        reference.load_decoder(directory)


def test_buffers_that_follow_from_the_config_are_ignored(make_checkpoint, reference):
    _, directory = make_checkpoint()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(directory, lambda tensors: tensors.update(buffer))
    reference.load_decoder(directory)


class TestTiedEmbeddings:
    """Four cases: the config ties or not, the head is there or not."""

    def test_untied_with_head_uses_the_head(self, make_checkpoint, reference, ids):
        theirs, directory = make_checkpoint()
        ours = reference.logits_of(reference.load_decoder(directory), ids)
        torch.testing.assert_close(ours, reference.transformers_logits(theirs, ids), atol=1e-4, rtol=0)

    def test_untied_without_head_is_an_error(self, make_checkpoint, reference):
        _, directory = make_checkpoint()
        edit(directory, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(ModelLoadError, match="missing: lm_head.weight"):
            reference.load_decoder(directory)

    def test_tied_without_head_shares_the_embedding(self, make_checkpoint, reference, ids):
        theirs, directory = make_checkpoint(tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(directory / "model.safetensors")
        model = reference.load_decoder(directory)
        assert model.lm_head.linear.weight is model.embedding.weight
        torch.testing.assert_close(
            reference.logits_of(model, ids), reference.transformers_logits(theirs, ids), atol=1e-4, rtol=0)

    def test_tied_with_the_same_head_shares_the_embedding(self, make_checkpoint, reference, ids):
        theirs, directory = make_checkpoint(tie_word_embeddings=True)
        edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        torch.testing.assert_close(
            reference.logits_of(reference.load_decoder(directory), ids), reference.transformers_logits(theirs, ids),
            atol=1e-4, rtol=0)

    def test_tied_with_another_head_is_an_error(self, make_checkpoint, reference):
        _, directory = make_checkpoint()
        edit_config(directory, tie_word_embeddings=True)
        with pytest.raises(ModelLoadError, match="tie_word_embeddings"):
            reference.load_decoder(directory)


def test_integers_in_place_of_weights_are_refused(make_checkpoint, reference):
    _, directory = make_checkpoint()
    edit(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].mul(10).to(torch.int8)}))
    with pytest.raises(ModelLoadError, match="lm_head.weight .* holds torch.int8"):
        reference.load_decoder(directory)


def test_loading_holds_one_layer_of_the_checkpoint_at_a_time(make_checkpoint, reference, monkeypatch):
    """Projections that are multiplied together are packed together."""
    _, directory = make_checkpoint()
    read, seen = SafetensorsWeights._read, []
    fused = re.compile(r"\b[qkv]_proj|\b(gate|up)_proj")

    def watched(self, name, *args):
        held = [other for other, tensor in seen if tensor() is not None]
        assert all(fused.sub("", other) == fused.sub("", name) for other in held), f"at {name} there are still {held}"
        tensor = read(self, name, *args)
        seen.append((name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(SafetensorsWeights, "_read", watched)
    model = reference.load_decoder(directory)
    del model
    assert len(seen) == 3 + 3 * 9


def test_a_part_of_a_tensor_is_read_without_the_rest(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    with SafetensorsWeights(tmp_path) as weights:
        assert torch.equal(weights.take("w", (4, 6), 0, Shard(1, 2)), whole[1:3])
        assert torch.equal(weights.take("w", (4, 6), 1, Shard(4, 2)), whole[:, 4:])


def test_leaving_the_source_untaken_is_an_error(make_checkpoint):
    _, directory = make_checkpoint()
    with pytest.raises(ModelLoadError, match="unexpected"), open_checkpoint(str(directory)).weights():
        pass


def test_the_bar_goes_to_a_terminal_on_stderr_only_and_can_be_turned_off(make_checkpoint, capsys, monkeypatch):
    _, directory = make_checkpoint()
    for progress, terminal in ((True, True), (True, False), (False, True)):
        capsys.readouterr()
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with open_checkpoint(str(directory), progress=progress).weights() as weights:
            for name in weights.names():
                weights.take(name, weights.shape(name))
        out, err = capsys.readouterr()
        assert out == "" and ("loading weights" in err) == (progress and terminal)
