"""Speculators with a model of their own: conformance, and what is refused before any weight is read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.testing.speculator import DenseCache, Span, check_speculator, services_for
from hotswap.plugins.speculators.draft import DraftModelSpeculator
from hotswap.plugins.speculators.eagle import EagleSpeculator
from hotswap.plugins.speculators.eagle_head import fused_taps


def draft(path: Path, **options: Any) -> DraftModelSpeculator:
    return DraftModelSpeculator(DraftModelSpeculator.Options(model=str(path), **options))


def eagle(path: Path, **options: Any) -> EagleSpeculator:
    return EagleSpeculator(EagleSpeculator.Options(model=str(path), **options))


@pytest.fixture(scope="module")
def target(load_target: Any, target_path: Path) -> Any:
    return load_target(target_path)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["draft", "eagle", "eagle3"])
def test_conforms(make_model: Any, make_head: Any, target: Any, kind: str, seed: int) -> None:
    path = make_model(noise=0.1) if kind == "draft" else make_head(kind)
    with torch.inference_mode():
        check_speculator(lambda: (draft if kind == "draft" else eagle)(path), seed=seed, target=target)


def test_the_kit_finds_a_speculator_that_leaves_a_gap_in_its_cache(make_model: Any, target: Any) -> None:
    class Forgetful(DraftModelSpeculator):
        """Believes that what the target has computed lies in its own cache, too."""

        def propose(self, rows: Any) -> Any:
            self._filled = {row.request: row.computed for row in rows}
            return super().propose(rows)

    path = make_model()
    with torch.inference_mode(), pytest.raises(AssertionError, match="is filled up to"):
        check_speculator(lambda: Forgetful(Forgetful.Options(model=str(path))), target=target)


def test_a_dense_cache_attends_as_one_pass_over_the_whole() -> None:
    q, k, v = (torch.randn(9, heads, 4, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 1))
    v = v.expand(9, 2, 4)
    whole = DenseCache(lambda layer: 0.5).lay_out([Span("a", 0, 9)])[1](0, q, k, v)
    cache, parts = DenseCache(lambda layer: 0.5), []
    for begin, end in ((0, 4), (4, 8), (6, 9)):  # the last one again, as after a rejection
        positions, attend = cache.lay_out([Span("a", begin, end)])
        assert positions.tolist() == list(range(begin, end))
        parts.append(attend(0, *(x[begin:end] for x in (q, k, v))))
    torch.testing.assert_close(torch.cat([parts[0], parts[1][:2], parts[2]]), whole)


def refused(speculator: Any, target: Any, match: str, path: str = "speculator.model") -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        speculator.bind(services_for(target))
    assert caught.value.path == path


def test_a_draft_model_with_another_vocabulary_is_refused_with_both_sizes(make_model: Any, target: Any) -> None:
    refused(draft(make_model(vocab_size=20)), target, "a vocabulary of 20 tokens and the target one of 16")


def test_a_draft_model_for_shorter_texts_is_refused_with_both_lengths(make_model: Any, target: Any) -> None:
    refused(draft(make_model(max_position_embeddings=40)), target, "made for 40 tokens, and requests may have 64")


def test_a_draft_model_that_is_not_there_is_refused_under_its_own_option(target: Any) -> None:
    refused(draft(Path("/nowhere/at/all")), target, "there is no file or directory '/nowhere/at/all'")


def test_a_draft_model_with_another_tokenizer_is_refused_with_the_token_that_differs(
    load_target: Any, target_path: Path, make_model: Any, tmp_path: Path,
) -> None:
    def with_words(path: Path, name: str, words: list[str]) -> Path:
        from tokenizers import Tokenizer, models

        copied = tmp_path / name
        shutil.copytree(path, copied)
        vocabulary = {word: id for id, word in enumerate(words)}
        Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])).save(str(copied / "tokenizer.json"))
        return copied

    words = [f"w{i}" for i in range(16)]
    target = load_target(with_words(target_path, "target", words))
    same = draft(with_words(make_model(seed=2), "same", words))
    same.bind(services_for(target))
    other = draft(with_words(make_model(seed=2), "other", [*words[:7], "seven", *words[8:]]))
    refused(other, target, "token 7 is 'seven' there and 'w7' in the target")


def test_a_draft_model_of_an_unknown_architecture_is_refused(target_path: Path, target: Any, tmp_path: Path) -> None:
    shutil.copytree(target_path, tmp_path / "odd")
    config = (tmp_path / "odd" / "config.json").read_text().replace("LlamaForCausalLM", "Nobody")
    (tmp_path / "odd" / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="Nobody"):
        draft(tmp_path / "odd").bind(services_for(target))


def test_a_draft_model_may_have_a_dtype_of_its_own(make_model: Any, make_worker: Any, target_path: Path) -> None:
    speculator = draft(make_model(), dtype="bfloat16")
    (*_, own) = make_worker(target_path, speculator).info().cache_specs
    assert own.group == "draft.full"
    assert own.bytes_per_token == 2 * 3 * 2 * 8 * 4, "the cache has the target's dtype"
    assert own.layers == (3, 4, 5), "behind the target's layers"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_for_another_hidden_size_is_refused_with_both_sizes(make_head: Any, target: Any, kind: str) -> None:
    refused(eagle(make_head(kind, hidden_size=64)), target, "a hidden size of 64, and the target's is 32")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_for_another_vocabulary_is_refused_with_both_sizes(make_head: Any, target: Any, kind: str) -> None:
    refused(eagle(make_head(kind, vocab_size=20)), target, "a vocabulary of 20 tokens and the target one of 16")


@pytest.mark.parametrize("layers", [[0, 1, 3], [-2, 0, 1], [0, 1], [0, 1, 2, 2]])
def test_layers_that_the_target_does_not_have_are_refused(make_head: Any, target: Any, layers: list[int]) -> None:
    refused(eagle(make_head("eagle3"), layers=layers), target, "expected three from -1", "speculator.layers")
    head = make_head("eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": layers})
    refused(eagle(head), target, "of the target's 3", "speculator.layers")


def test_both_published_ways_to_count_layers_name_the_same_states() -> None:
    names = ("layer:1", "layer:15", "layer:28")
    assert fused_taps({}, None, 32) == names, "what goes into layers 2, L / 2 and L - 3"
    assert fused_taps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, None, 32) == names
    assert fused_taps({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, None, 32) == names
    assert fused_taps({"eagle_aux_hidden_state_layer_ids": [0, 1, 32]}, None, 32) == (
        "embedding", "layer:0", "layer:31")
    assert fused_taps({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, [-1, 0, 1], 32) == (
        "embedding", "layer:0", "layer:1"), "the option has the last word"


def test_tensors_that_a_head_lacks_or_that_do_not_fit_are_named(make_head: Any, target: Any) -> None:
    def load(path: Path) -> None:
        speculator = eagle(path)
        speculator.bind(services_for(target))
        speculator.load()

    with pytest.raises(ModelLoadError, match=r"missing: midlayer\.hidden_norm\.weight"):
        load(make_head("eagle3", drop=("midlayer.hidden_norm.weight",)))
    with pytest.raises(ModelLoadError, match=r"fc\.weight has shape \(32, 64\), the config promises \(32, 96\)"):
        load(make_head("eagle3", put={"fc.weight": torch.zeros(32, 64)}))
    with pytest.raises(ModelLoadError, match="unexpected: extra"):
        load(make_head("eagle", put={"extra": torch.zeros(3)}))
    with pytest.raises(ConfigError, match="d2t of .* leads to tokens from 0 to 31, the vocabulary has 16"):
        load(make_head("eagle3", put={"d2t": torch.tensor([0] * 11 + [20])}))
    with pytest.raises(ConfigError, match="drafts 12 of 16 tokens, and has no d2t"):
        load(make_head("eagle3", drop=("d2t",)))


def test_an_eagle_3_head_drafts_only_what_its_own_vocabulary_has(make_head: Any, target: Any) -> None:
    speculator = eagle(make_head("eagle3"))
    speculator.bind(services_for(target))
    speculator.load()
    logits = speculator._logits(torch.randn(5, 32))
    assert logits.shape == (5, 16)
    assert (logits == -torch.inf).all(0).nonzero()[:, 0].tolist() == [0, 1, 2, 9]


def test_hidden_states_and_caches_are_not_given_behind_pipeline_stages(make_head: Any, target: Any) -> None:
    from hotswap.core.execution.worker import check_needs
    from hotswap.core.modeling.mesh import Mesh

    speculator = eagle(make_head("eagle"))
    speculator.bind(services_for(target))
    mesh = Mesh()
    mesh.is_last = False
    with pytest.raises(ConfigError, match="which several stages do not give it"):
        check_needs(speculator, speculator.needs(), target.model, mesh)
