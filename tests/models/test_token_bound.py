"""A text's least number of tokens, told without encoding it."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.tokenizer import Tokenizer

ALPHABET = {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(without="", **added):
    alphabet = {token: id for token, id in ALPHABET.items() if token not in without}
    backend = Backend(models.BPE(vocab=alphabet | {"aa": 256, "aaaa": 257}, merges=[("a", "a"), ("aa", "aa")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if added:
        backend.add_special_tokens([AddedToken("<x>", **added)])
    return backend


def composing():
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def pieces(vocabulary):
    backend = Backend(models.BPE(
        vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


WHOLE = BYTES | {"<unk>": 256, "▁": 257, "a": 258, "▁a": 259}
BOUNDED = {"bytes": byte_level(), "bytes-added": byte_level(normalized=False), "composing": composing(),
           "bytes-missing": byte_level(without="b\u0104\u00c0\u00f1"),
           "pieces": pieces(WHOLE)}


@pytest.mark.parametrize("backend", BOUNDED.values(), ids=list(BOUNDED))
def test_no_text_has_fewer_tokens_than_is_said(backend):
    tokenizer = Tokenizer(backend)
    assert tokenizer.least_tokens("a" * 1000) > 10

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.sampled_from([
        "a", "aaaa", "b", "\x04", " ", "<x>", "α\u0313\u0300\u0345", "가", "ạ̈", "İ", "🙂",
    ])).map("".join))
    def run(text):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    run()


def unknown_pieces():
    return pieces({token: id for id, token in enumerate(["<unk>", "▁", "a", "▁a"])})


def dropping():
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def stripping():
    backend = byte_level()
    backend.normalizer = normalizers.Strip()
    return backend


def removing():
    backend = byte_level()
    backend.normalizer = normalizers.Replace("  ", " ")
    return backend


@pytest.mark.parametrize("backend", [
    Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")), unknown_pieces(), dropping(), stripping(),
    removing(), byte_level(rstrip=True), byte_level(without="\u0122"),
])
def test_rules_that_drop_or_join_text_without_limit_say_nothing(backend):
    assert Tokenizer(backend).least_tokens("a" * 10**6) == 0


def test_long_texts_are_encoded_as_short_ones_and_hold_up_no_other_thread():
    tokenizer = open_checkpoint("smollm2-135m-instruct", progress=False).tokenizer()
    assert tokenizer.least_tokens("hello " * 2**20) > 8192
    text = "hello 🙂 <|im_end|> " * 500
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids
    plain = tokenizer.encode_without_special_parsing(text)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == text

    encoding = threading.Thread(target=lambda: tokenizer.encode("hello " * 2**17))
    ticks = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 10
