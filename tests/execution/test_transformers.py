"""The whole worker, from files to tokens, against transformers' generate."""

import pytest
import torch

from hotswap.core.execution.builder import WorkerBuilder
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.interfaces.parallel import RankPlan
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.models.decoder import DecoderModel
from hotswap.plugins.parallel.inline import InlineExecutor
from hotswap.plugins.speculators.ngram import NgramSpeculator
from hotswap.plugins.speculators.none import NoSpeculator

COUNT = 24
LENGTHS = (3, 16, 31, 70)


@pytest.fixture(scope="module", params=["Llama", "Mistral"])
def checkpoint(request, tmp_path_factory):
    """A tiny random model of a family, Mistral with a sliding window, and its directory."""
    import transformers

    window = {"sliding_window": 20} if request.param == "Mistral" else {}
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager", pad_token_id=0, **window)
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + ("norm" in name))
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


def generate(model, prompt):
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("make_speculator", [
    NoSpeculator, lambda: NgramSpeculator(NgramSpeculator.Options(min_n=1)),
], ids=["plain", "ngram"])
@pytest.mark.parametrize("chunk", [13, 128])
def test_greedy_tokens_are_those_of_transformers(checkpoint, make_host_of, chunk, make_speculator):
    theirs, directory = checkpoint
    opened = open_checkpoint(str(directory), progress=False)
    settings = WorkerSettings("float32", "cpu", 128, 512, 4, num_threads=1)
    speculator = make_speculator()
    factory = WorkerBuilder(opened, DecoderModel(), TorchAttention(), speculator, (), settings)
    worker = factory(RankPlan(), 0)
    host = make_host_of(worker, 8, 100)
    prompts = [torch.randint(0, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
    for i, prompt in enumerate(prompts):
        host.new(str(i), prompt)
        host.prefill(str(i), chunk)
    while min(len(host.tokens[str(i)]) - len(prompt) for i, prompt in enumerate(prompts)) < COUNT:
        for i in range(len(prompts)):
            host.row(str(i), 1, speculator.needs().lookahead)
        host.step()
    for i, prompt in enumerate(prompts):
        assert host.tokens[str(i)][len(prompt) :][:COUNT] == generate(theirs, prompt)


def test_the_worker_runs_behind_the_executor(checkpoint):
    opened = open_checkpoint(str(checkpoint[1]), progress=False)
    settings = WorkerSettings("float32", "cpu", 128, 512, 4, num_threads=1)
    executor = InlineExecutor()
    info = executor.launch(
        WorkerBuilder(opened, DecoderModel(), TorchAttention(), NoSpeculator(), (), settings), RankPlan())
    executor.stop()
    assert info.facts.vocab_size == 128
    assert info.max_model_len == 128
    assert info.free_bytes > 0
