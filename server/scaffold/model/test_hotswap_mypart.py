"""The kit compares it with transformers, whole, in chunks, in batches and over ranks; then what is its own."""

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.testing.checkpoints import LLAMA
from hotswap.core.testing.model import ModelSuite
from hotswap_mypart import MyPart


class TestMyPart(ModelSuite):
    def make_model(self) -> MyPart:
        return MyPart()


class TestMyPartWithATiedHead(TestMyPart):
    config = LLAMA | {"tie_word_embeddings": True}


@pytest.mark.parametrize(("key", "value"), [("mlp_bias", True), ("sliding_window", 8), ("hidden_act", "gelu")])
def test_what_it_has_not_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        MyPart.facts(LLAMA | {key: value})
