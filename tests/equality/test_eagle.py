"""Speculation with EAGLE heads that are fitted here, since a random one is never right: the tokens of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotswap.core.execution import graphs
from hotswap.core.interfaces.speculator import Drawn, ObservedRow, ProposeRow
from hotswap.core.testing.graphs import RecordingGraphs

HIDDEN, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 64, 160, 120
MAX_TOKENS = 24
STEPS = 100
FUSED = {"eagle": ["final"], "eagle3": ["embedding", "layer:0", "layer:1"]}
"""The states that a head sees, by our names."""


class Head(nn.Module):
    """An EAGLE head over whole sequences, from transformers' parts and with the published names."""

    def __init__(self, config: Any, kind: str) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        self.kind, self.rope = kind, [LlamaRotaryEmbedding(config)]
        layer = LlamaDecoderLayer(config, 0)
        if kind == "eagle":
            self.fc = nn.Linear(2 * HIDDEN, HIDDEN)
            del layer.input_layernorm
            self.layers = nn.ModuleList([layer])
            return
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, nn.Linear(2 * HIDDEN, getattr(layer.self_attn, name).out_features, False))
        layer.hidden_norm = LlamaRMSNorm(HIDDEN, config.rms_norm_eps)
        self.midlayer, self.norm = layer, LlamaRMSNorm(HIDDEN, config.rms_norm_eps)
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB_SIZE, bias=False)

    def forward(self, states: Any, embedded: Any) -> Any:
        """states [B, T, .] and the tokens behind them [B, T, h] -> [B, T, h]."""
        positions = torch.arange(states.shape[1])[None]
        rope = self.rope[0](embedded, positions)
        mask = torch.full((states.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        if self.kind == "eagle":
            x, layer = self.fc(torch.cat([embedded, states], -1)), self.layers[0]
            entering = x
        else:
            x, layer = self.fc(states) if states.shape[-1] > HIDDEN else states, self.midlayer
            entering = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], -1)
        x = x + layer.self_attn(entering, position_embeddings=rope, attention_mask=mask)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, x: Any, target: Any) -> Any:
        return target.lm_head(x) if self.kind == "eagle" else self.lm_head(self.norm(x))


def texts(tiny: Any) -> tuple[Any, Any]:
    """[B, 64]: what the target says behind the prompts of the tests, padded; and [B, 63], where that is to be guessed.

    A random model's choices cannot be learned, only remembered.
    """
    ids, known = torch.zeros(8, 64, dtype=torch.int64), torch.zeros(8, 63, dtype=torch.bool)
    for row, prompt in enumerate(tiny.prompts()):
        said = tiny.reference.model.generate(
            torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        ids[row, : len(said)] = said
        known[row, max(0, len(prompt) - 2) : len(said) - 1] = True
    return ids, known


def states_of(target: Any, ids: Any) -> tuple[dict[str, Any], Any]:
    """The hidden states [B, T, h] of transformers' model, by our names, and its logits [B, T, V]."""
    states: dict[str, Any] = {}
    modules = {"embedding": target.model.embed_tokens, "final": target.model.norm} | {
        f"layer:{i}": layer for i, layer in enumerate(target.model.layers)}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: states.__setitem__(name, out))
        for name, module in modules.items()]
    logits = target(ids).logits
    for hook in hooks:
        hook.remove()
    return states, logits


def fit(tiny: Any, kind: str) -> tuple[Head, Any]:
    """A head, and the tokens of its vocabulary: those that the target says most."""
    torch.manual_seed(3)
    target = tiny.reference.model
    with torch.no_grad():
        ids, known = texts(tiny)
        given, logits = states_of(target, ids)
        states = torch.cat([given[name] for name in FUSED[kind]], -1)
        embedded, best = target.model.embed_tokens(ids), logits.argmax(-1)[:, 1:]
    common = best[known].bincount(minlength=VOCAB_SIZE).argsort(descending=True, stable=True)
    drafted = common[:DRAFT_VOCAB_SIZE].sort().values if kind == "eagle3" else torch.arange(VOCAB_SIZE)
    draft_id = torch.full((VOCAB_SIZE,), -100).index_copy(0, drafted, torch.arange(len(drafted)))
    goal = draft_id[best].where(known, -100)
    head = Head(target.config, kind)
    optimizer = torch.optim.AdamW(head.parameters(), 4e-3)
    for _ in range(STEPS):
        x, loss = states[:, :-1], torch.zeros(())
        for _ in range(2):  # the second time with the head's own states, as when it drafts
            x = head(x, embedded[:, 1:])
            loss = loss + nn.functional.cross_entropy(
                head.logits(x, target).flatten(0, 1), goal.flatten(), ignore_index=-100)
            x = torch.cat([torch.zeros(len(x), 1, HIDDEN), x[:, :-1]], 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head, drafted


def save(head: Head, drafted: Any, config: Any, path: Path) -> Path:
    """As the published checkpoints are laid out; the embedding comes along, as in theirs."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    entries = {
        key: getattr(config, key) for key in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "vocab_size")}
    entries |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "rope_theta": 10000.0}
    if head.kind == "eagle3":
        tensors["d2t"] = drafted - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, drafted, True)
        entries |= {
            "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(drafted),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}
    tensors["embed_tokens.weight"] = torch.zeros(config.vocab_size, HIDDEN)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(entries))
    return path


@pytest.fixture(scope="session", params=["eagle", "eagle3"])
def head(request: pytest.FixtureRequest, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fitted head of either kind, and its directory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one would only wait: beside busy neighbours for minutes
    fitted, drafted = fit(tiny, request.param)
    torch.set_num_threads(threads)
    path = tmp_path_factory.mktemp(request.param)
    return fitted, save(fitted, drafted, tiny.reference.model.config, path), drafted


@pytest.mark.parametrize(("scheduler", "kv", "depth"), [
    ("continuous", "contiguous", 1), ("continuous", "paged", 2), ("chunked", "paged", 1), ("chunked", "prefix", 1),
    ("chunked", "prefix", 2),
])
def test_a_head_changes_no_token(
    run: Any, thrice: Any, tiny: Any, head: Any, scheduler: str, kv: str, depth: int,
) -> None:
    chunks: dict[str, Any] = {"max_chunk": 7} if scheduler == "chunked" else {}
    speculator = {"use": "eagle", "model": str(head[1]), "max_draft": 3}
    engine = run(tiny.config({"use": scheduler, **chunks}, kv, speculator, depth))
    seen = thrice(engine, tiny, MAX_TOKENS, depth)
    print(engine.built.engine.loads().extra["speculation"])
    assert 0.2 < seen["accepted"] / (seen["accepted"] + seen["rejected"]) < 0.8, dict(seen)
    assert bool(seen["cached tokens"]) is (kv == "prefix")
    if scheduler != "continuous":
        assert seen["cut prompts"]
    if kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"


def test_the_example_starts_with_this_head(run: Any, book: Any, tiny: Any, head: Any, example: Any) -> None:
    config = example("eagle", tiny.path)
    config["speculator"]["model"] = str(head[1])
    engine, prompts = run(config), tiny.prompts()
    for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert engine.seen["accepted"] and engine.seen["rejected"]


def test_with_graphs_a_head_changes_no_token(
    run: Any, book: Any, tiny: Any, head: Any, monkeypatch: pytest.MonkeyPatch, torch_operators: None,
) -> None:
    monkeypatch.setitem(graphs.DEVICES, "cpu", RecordingGraphs)
    settings = tiny.config("chunked", "prefix", {"use": "eagle", "model": str(head[1]), "max_draft": 3}, 2)
    settings |= {"attention": {"use": "torch", "graphs": True}}
    settings["execution"]["graphs"] = "full"
    engine = run(settings)
    for _ in range(2):
        for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    [report] = engine.built.engine.loop.parts.executor.report()
    assert report.counts["graph_replays"] > 20
    assert report.counts["draft_graph_replays"] > 20
    assert 0.2 < engine.seen["accepted"] / (engine.seen["accepted"] + engine.seen["rejected"]) < 0.8


@pytest.mark.slow
def test_each_rank_of_tensor_parallelism_has_a_head(run: Any, book: Any, tiny: Any, head: Any) -> None:
    speculator = {"use": "eagle", "model": str(head[1]), "max_draft": 3}
    engine = run(tiny.config("chunked", "prefix", speculator, 2, parallel=[{"use": "tensor", "size": 2}]))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert 0.2 < engine.seen["accepted"] / (engine.seen["accepted"] + engine.seen["rejected"]) < 0.8
    reports = engine.built.engine.call(engine.built.engine.loop.parts.executor.report)
    assert len(reports) == 2
    assert reports[0].speculator_bytes == reports[1].speculator_bytes > 4 * HIDDEN * HIDDEN
    engine.assert_clean()


def test_a_host_tier_and_forks_change_no_token(run: Any, book: Any, tiny: Any, head: Any) -> None:
    """What comes back from host memory, or from a parent, has the head's pages, too."""
    speculator = {"use": "eagle", "model": str(head[1]), "max_draft": 3}
    engine = run(tiny.config(
        {"use": "chunked", "max_chunk": 7}, "radix", speculator, 2, num_blocks=38,
        kv_transfer={"use": "host", "memory": "2MiB", "swap_overhead": 30}))
    for seed in (1, 2, 1):  # what one round leaves, the next one drives out
        for prompt, output in zip(tiny.prompts(seed), engine.generate(tiny.prompts(seed), MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    moved = engine.built.engine.call(engine.built.engine.loop.transfers.counters)
    assert moved["hits"] and moved["swaps_in"], moved
    prompt = tiny.prompts()[3]
    parent = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    before = engine.seen["accepted"]
    for answer in engine.answer(parent, *[{**parent, "fork_of": engine.name(0)}] * 2):
        book.compare(tiny.reference, prompt, answer.token_ids)
    assert engine.seen["accepted"] - before > 12


def test_choices_that_share_a_prompt_change_no_token_and_cost_no_acceptance(
    run: Any, book: Any, tiny: Any, head: Any,
) -> None:
    """The head's own cache is shared, too; the states that it reads at the end of the prompt are computed again."""
    speculator = {"use": "eagle", "model": str(head[1]), "max_draft": 3}
    accepted = []
    for fork in (False, True):
        engine = run(tiny.config("chunked", "paged", speculator, 2, num_blocks=400))
        for prompt in tiny.prompts()[2:5]:
            answers = engine.answer(*(
                {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True,
                 "fork_of": engine.name(0) if i and fork else None} for i in range(4)))
            for answer in answers:
                book.compare(tiny.reference, prompt, answer.token_ids)
            shared = len(prompt) - 1 - engine.built.engine.loop.limits.reuse_tail
            assert [answer.cached_tokens for answer in answers] == [0, *[shared * fork] * 3]
        engine.assert_clean()
        accepted.append(engine.seen["accepted"])
    assert accepted[0] > 30
    assert abs(accepted[1] - accepted[0]) <= 0.05 * accepted[0]


def test_a_cached_prefix_costs_no_acceptance(run: Any, tiny: Any, head: Any) -> None:
    speculator = {"use": "eagle", "model": str(head[1]), "max_draft": 3}
    engine = run(tiny.config("chunked", "prefix", speculator, 1, num_blocks=400))
    accepted = []
    for warm in (False, True):
        before = engine.seen["accepted"]
        for prompt in tiny.prompts()[2:4]:
            engine.generate([prompt], MAX_TOKENS)
        accepted.append(engine.seen["accepted"] - before)
        assert bool(engine.seen["cached tokens"]) is warm
    cold, warm_count = accepted
    assert cold > 10
    assert abs(warm_count - cold) <= 0.05 * cold


@torch.no_grad()
def test_drafts_are_those_of_the_head_over_whole_texts(tiny: Any, head: Any) -> None:
    """With the target's states wherever it has computed them, however the text was cut and whatever was rejected; the
    head's own states stand only behind the last of them."""
    fitted, path, drafted = head
    target = tiny.reference.model
    prompt = tiny.prompts()[3]
    ids = target.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    given, _ = states_of(target, ids[None])
    embed = target.model.embed_tokens

    def expected(computed: int, count: int) -> list[int]:
        states = torch.cat([given[name] for name in FUSED[fitted.kind]], -1)
        x = states[:, :computed] if fitted.kind == "eagle" else fitted.fc(states[:, :computed])
        text, found = ids[: computed + 1].tolist(), []
        for _ in range(count):
            guess = fitted(x, embed(torch.tensor([text[1:]])))[:, -1:]
            found.append(int(drafted[fitted.logits(guess, target)[0, -1].argmax()]))
            x, text = torch.cat([x, guess], 1), [*text, found[-1]]
        return found

    rig = Rig(tiny, path)
    computed = 0
    for end, accepted in ((7, 0), (20, 0), (40, 0), (41, 0), (42, 2), (45, 1), (47, 3)):
        kept = ids[: end + accepted + 1] if end >= len(prompt) else torch.tensor(prompt)
        drafts = rig.step(ids[:end], computed, end, accepted, kept, given)
        if computed >= len(prompt):
            assert drafts == expected(computed, 3)
        computed = end + accepted


class Rig:
    """The speculator alone, with a dense cache, a real target and states that were computed by transformers."""

    def __init__(self, tiny: Any, path: Path) -> None:
        from hotswap.core.execution.worker import model_for
        from hotswap.core.modeling.checkpoint import open_checkpoint
        from hotswap.core.modeling.mesh import LOCAL_MESH
        from hotswap.core.testing.speculator import DenseCache, Target, services_for
        from hotswap.plugins.speculators.eagle import EagleSpeculator

        checkpoint = open_checkpoint(str(tiny.path), progress=False)
        model = model_for(checkpoint)
        model.build(checkpoint.config, LOCAL_MESH, torch.float32, "cpu")
        with checkpoint.weights() as weights:
            model.load(weights)
        self.speculator = EagleSpeculator(EagleSpeculator.Options(model=str(path), max_draft=3))
        cache = DenseCache(lambda layer: self.speculator.needs().shapes["eagle"].scale)
        services = services_for(Target(model, checkpoint), cache)
        self.speculator.bind(replace(services, draw=best))
        self.speculator.load()

    def step(self, known: Any, begin: int, end: int, accepted: int, kept: Any, states: Any) -> list[int]:
        """Propose behind ``known``, then see ``accepted`` drafts kept; returns the drafts."""
        asked = ProposeRow("a", known.numpy(), 3 if end == len(known) else 0, begin, end)
        (drafts,) = self.speculator.propose([asked]).tokens
        shown = {name: state[0, begin : end + 3] for name, state in states.items()}
        row = ObservedRow("a", kept.numpy(), len(drafts), accepted, begin, end + accepted, 0)
        self.speculator.observe([row], shown)
        return drafts


def best(logits: Any, rows: Any) -> Drawn:
    return Drawn(logits.argmax(-1).tolist(), None)
