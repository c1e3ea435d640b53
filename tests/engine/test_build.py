"""From a config to an engine: what does not fit together is refused, and nothing is left behind."""

import json
import re
import threading
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hotswap.core.config import load_config
from hotswap.core.engine import build as build_module
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import ConfigError
from hotswap.core.execution.builder import SharedModels
from hotswap.core.request import Request, SamplingParams
from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.attention.torch_sdpa import TorchAttention


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "smollm2-135m-instruct"  # also the name of a catalogue model
    LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )).save_pretrained(path)
    return path


def build(model, **changes):
    values = {"model": model, "device": "cpu", "dtype": "float32", "kvcache": {"memory": "1MiB"}, **changes}
    return build_engine(load_config(values, environ={}), progress=False)


def refusal(model, **changes):
    threads = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        build(model, **changes)
    assert threading.active_count() == threads, "a worker was left behind"
    return str(caught.value)


@pytest.mark.parametrize("path", ["owner/name", "smollm2-135m-instruct", "./nowhere", "~/nowhere.gguf"])
def test_a_path_that_is_not_there_is_never_looked_for_elsewhere(monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    assert refusal({"path": path}).startswith(f"model.path: there is no file or directory {path!r}")


def test_a_path_means_what_lies_there_even_if_a_catalogue_model_has_its_name(monkeypatch, directory):
    monkeypatch.chdir(directory.parent)
    built = build({"path": directory.name})
    built.engine.stop()
    assert built.facts.vocab_size == 64


def test_a_revision_of_what_is_no_hub_repository_is_refused(directory):
    for model in ({"path": str(directory), "revision": "main"}, {"name": str(directory), "revision": "main"},
                  {"name": "smollm2-135m-instruct", "revision": "main"}):
        assert refusal(model).startswith("model.revision: 'main' was given")


def test_a_kind_of_device_that_there_is_not_is_refused_without_torch_s_own_list(directory):
    assert refusal({"path": str(directory)}, device="gpu").startswith(
        "device: there is no kind of device called 'gpu'; give cpu, cuda")


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(directory):
    assert refusal({"path": str(directory)}, max_model_len=129).startswith(
        "max_model_len: 129 tokens were given, but the model was made for 128")


def test_ranks_whose_loop_does_not_answer_in_time_are_left_out(directory, monkeypatch):
    built, hold, held = build({"path": str(directory)}), threading.Event(), threading.Event()
    engine = built.engines[0].engine
    monkeypatch.setattr(build_module, "RANKS_TIMEOUT_S", 0.01)
    try:
        engine._command(lambda: held.set() or hold.wait(10))
        assert held.wait(10)
        assert built.ranks() == []
        hold.set()
        monkeypatch.undo()
        assert [report["rank"] for report in built.ranks()] == [0]
    finally:
        hold.set()
        built.engine.stop()


def test_a_cache_too_small_for_one_request_is_refused_and_the_worker_stopped(directory):
    assert "kvcache.num_blocks" in refusal({"path": str(directory)}, kvcache={"num_blocks": 3})


@pytest.mark.parametrize("numbers", [2**50, 2**62], ids=["more than there is", "more than can be counted"])
def test_pages_that_memory_does_not_hold_are_refused_with_what_to_lower(directory, monkeypatch, numbers):
    monkeypatch.setattr(TorchAttention, "allocate", lambda *arguments: torch.empty(numbers))
    assert re.match(
        r"kvcache: there is not enough memory for the cache \(.+\); lower kvcache.memory or kvcache.num_blocks",
        refusal({"path": str(directory)}, attention="torch"))


def test_more_memory_for_pages_than_is_free_is_warned_of_with_both_numbers(directory, monkeypatch, caplog):
    monkeypatch.setattr(TorchAttention, "allocate", lambda *arguments: torch.empty(2**50))
    monkeypatch.setattr("hotswap.core.execution.worker.free_bytes", lambda device: 2**30)
    for memory, warnings in (("900KiB", 0), ("900GiB", 1)):
        refusal({"path": str(directory)}, attention="torch", kvcache={"memory": memory},
                scheduler={"max_running": 2, "max_batch_tokens": 64})
        told = [record.getMessage() for record in caplog.records if "kvcache.memory" in record.getMessage()]
        assert len(told) == warnings
    assert re.search(r"900\.0 GiB were asked for, more than the 0\.\d GiB that are free for pages here", told[0])


def test_what_else_fails_while_pages_are_made_is_told_as_it_is(directory, monkeypatch):
    def allocate(*arguments):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(TorchAttention, "allocate", allocate)
    with pytest.raises(RuntimeError, match="^no kernel image is available$"):
        build({"path": str(directory)}, attention="torch")


def test_an_architecture_that_nobody_knows_is_refused_with_those_that_there_are(directory, tmp_path):
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NobodyForCausalLM"]}))
    for model in ({"path": str(tmp_path)}, {"path": str(tmp_path), "fallback": None}):
        message = refusal(model)
        assert "no component is registered for the checkpoint's architecture 'NobodyForCausalLM'" in message
        assert "LlamaForCausalLM" in message


def test_engines_that_can_share_a_model_load_its_weights_once(directory):
    loads = []

    class Counted(SharedModels):
        def join(self, builder):
            joined = super().join(builder)
            loads.append(id(joined.model))
            return joined

    models = Counted(engines=3)
    engines = [
        build_engine(load_config({
            "model": {"path": str(directory)}, "device": "cpu", "dtype": dtype, "kvcache": {"memory": "1MiB"},
            "scheduler": scheduler}, environ={}), progress=False, models=models)
        for dtype, scheduler in (("float32", "chunked"), ("float32", "static"), ("bfloat16", "chunked"))]
    try:
        assert loads[0] == loads[1] != loads[2], "what has another dtype has other weights"
        answers = [greedy(built) for built in engines[:2]]
        assert answers[0] == answers[1]
    finally:
        for built in engines:
            built.engine.stop()


def greedy(built):
    """Eight tokens behind a prompt."""
    tokens, done = [], threading.Event()

    def sink(output):
        tokens.extend(output.token_ids)
        if output.finish_reason is not None:
            done.set()

    built.engine.add(Request("one", [3, 1, 4, 1, 5], SamplingParams(temperature=0.0, max_tokens=8)), sink)
    assert done.wait(30)
    return tokens


def test_attention_that_lacks_what_the_model_needs_is_passed_over_at_the_start_and_in_every_exchange(
    directory, monkeypatch,
):
    support = CPUAttention.support
    monkeypatch.setattr(CPUAttention, "support", lambda self: replace(support(self), head_dims=(7,)))
    built = build({"path": str(directory)}, parallel=[{"use": "data", "replicas": 1}])
    try:
        [note] = [note for note in built.notes if note.startswith("attention: ")]
        assert note.startswith("attention: auto chose 'torch', because it runs on any device")
        assert "cpu does not take head size 16, but 7" in note
        [report] = built.exchange(["scheduler=continuous"])
        assert [part.path for part in report.parts] == ["scheduler"]
        assert [entry["name"] for entry in built.listing() if entry["kind"] == "attention"] == ["torch"]
        assert len(greedy(built)) == 8
    finally:
        built.engine.stop()


def test_each_of_the_engines_that_share_a_model_has_its_attention_checked(directory, monkeypatch):
    from hotswap.plugins.attention.torch_sdpa import TorchAttention

    models = SharedModels(2)
    values = {
        "model": {"path": str(directory)}, "device": "cpu", "dtype": "float32", "kvcache": {"memory": "1MiB"},
        "attention": "torch"}
    first = build_engine(load_config(values, environ={}), progress=False, models=models)
    try:
        support = TorchAttention.support
        monkeypatch.setattr(TorchAttention, "support", lambda self: replace(support(self), head_dims=(7,)))
        with pytest.raises(ConfigError, match="head size 16"):
            build_engine(load_config(values, environ={}), progress=False, models=models)
    finally:
        first.engine.stop()
