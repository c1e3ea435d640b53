"""The kit compares it with transformers, whole, in chunks, in batches and over ranks; then what is its own."""

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.modeling.checkpoint import Checkpoint
from hotswap.core.testing.checkpoints import LLAMA
from hotswap.core.testing.dense import loaded, logits_of
from hotswap.core.testing.model import IDS, ModelSuite
from hotswap_mypart import MyPart


class TestMyPart(ModelSuite):
    def make_model(self) -> MyPart:
        return MyPart()

    def test_a_softcap_squashes_the_logits(self, checkpoint: Checkpoint) -> None:
        plain = logits_of(loaded(MyPart(), checkpoint), IDS)
        capped = logits_of(loaded(MyPart(MyPart.Options(softcap=0.01)), checkpoint), IDS)
        assert plain.abs().max() > 0.01
        torch.testing.assert_close(capped, 0.01 * torch.tanh(plain / 0.01))


class TestMyPartWithATiedHead(TestMyPart):
    config = LLAMA | {"tie_word_embeddings": True}


@pytest.mark.parametrize(("key", "value"), [("mlp_bias", True), ("sliding_window", 8), ("hidden_act", "gelu")])
def test_what_it_has_not_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        MyPart.facts(LLAMA | {key: value})
