"""A model written with logical axes runs on any mesh: here ranks are threads, and no model knows it."""

import threading

import pytest
import torch

from hotswap.core.modeling.mesh import Mesh, Shard


class ThreadMesh(Mesh):
    """Even shards of the given axes over ``size`` threads that meet at a barrier."""

    def __init__(self, rank, size, axes, meeting):
        self.rank, self.size, self.axes = rank, size, axes
        self.barrier, self.slots = meeting

    def shard(self, axis, total):
        if axis not in self.axes:
            return Shard(0, total)
        count = total // self.size
        return Shard(self.rank * count, count)

    def _meet(self, axis, x, combine):
        if axis not in self.axes:
            return x
        self.slots[self.rank] = x
        self.barrier.wait()
        result = combine(self.slots)
        self.barrier.wait()
        return result

    def reduce(self, axis, x):
        return self._meet(axis, x, lambda parts: torch.stack(parts).sum(0))

    def gather(self, axis, x, dim):
        return self._meet(axis, x, lambda parts: torch.cat(parts, dim))


def on_ranks(size, axes, work):
    """``work(mesh)`` on each of ``size`` ranks; their results in order."""
    meeting = threading.Barrier(size, timeout=60), [None] * size
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = work(ThreadMesh(rank, size, axes, meeting))
        except BaseException as error:
            errors.append(error)
            meeting[0].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("family, config", [
    ("Llama", {"attention_bias": True, "mlp_bias": True}), ("Qwen2", {"tie_word_embeddings": True}), ("Qwen3", {}),
])
def test_two_ranks_that_share_heads_mlp_and_vocabulary_equal_one(family, config, make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(family, **config)

    def work(mesh):
        model = reference.load_decoder(directory, mesh=mesh)
        assert model.layers[0].qkv.weight.shape == (2 * 16 + 2 * 16, 64)
        assert [spec.kv_heads for spec in model.cache_specs()] == [1]
        return reference.logits_of(model, ids)

    expected = reference.transformers_logits(theirs, ids)
    for logits in on_ranks(2, {"heads", "kv_heads", "mlp", "vocab"}, work):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_hold_their_layers_and_equal_one_rank(tied, make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(tie_word_embeddings=tied)
    stages = on_ranks(3, {"layers"}, lambda mesh: reference.load_decoder(directory, mesh=mesh))
    assert [[layer.index for layer in stage.layers] for stage in stages] == [[0], [1], [2]]
    with torch.inference_mode():
        x = torch.tensor(ids)
        for stage in stages:
            x = stage.forward(x, torch.arange(len(ids)), reference.PlainAttention(stage))
        logits = stages[-1].head(x)
    torch.testing.assert_close(logits, reference.transformers_logits(theirs, ids), atol=1e-4, rtol=0)
