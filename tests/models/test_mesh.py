"""A model written with logical axes runs on any mesh: here ranks are threads, and no model knows it."""

import pytest
import torch


@pytest.mark.parametrize("family, config", [
    ("Llama", {"attention_bias": True, "mlp_bias": True}), ("Qwen2", {"tie_word_embeddings": True}), ("Qwen3", {}),
])
def test_two_ranks_that_share_heads_mlp_and_vocabulary_equal_one(
        family, config, make_checkpoint, threads, reference, ids):
    theirs, directory = make_checkpoint(family, **config)

    def work(mesh):
        model = reference.load_decoder(directory, mesh=mesh)
        assert model.layers[0].qkv.linear.weight.shape == (2 * 16 + 2 * 16, 64)
        assert [spec.kv_heads for spec in model.cache_specs()] == [1]
        return reference.logits_of(model, ids)

    expected = reference.transformers_logits(theirs, ids)
    for logits in threads.on_ranks(2, {"heads", "kv_heads", "mlp", "vocab"}, work):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_hold_their_layers_and_equal_one_rank(tied, make_checkpoint, threads, reference, ids):
    theirs, directory = make_checkpoint(tie_word_embeddings=tied)
    stages = threads.on_ranks(3, {"layers"}, lambda mesh: reference.load_decoder(directory, mesh=mesh))
    assert [[layer.index for layer in stage.layers] for stage in stages] == [[0], [1], [2]]
    with torch.inference_mode():
        x = torch.tensor(ids)
        for stage in stages:
            x = stage.forward(x, torch.arange(len(ids)), reference.PlainAttention(stage))
        logits = stages[-1].head(x)
    torch.testing.assert_close(logits, reference.transformers_logits(theirs, ids), atol=1e-4, rtol=0)
