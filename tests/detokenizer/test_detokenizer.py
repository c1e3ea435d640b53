"""Tokens to text, incrementally; on the byte level, on SentencePiece's way, and on SmolLM2's real tokenizer."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.server.text.detokenizer import ByteDecoder, StreamDetokenizer, WindowDecoder, incremental_decoder
from hotswap.server.text.tokens import TokenTexts

TEXTS = ["한국어 🙂 é", " a  b", "\n x", "naïve café 👩‍👩‍👧 done", "日本語。", "", " ", "▁ tricky", "�", "a�b"]


def byte_level() -> Tokenizer:
    vocabulary = {"<eos>": 0} | {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, None, "<eos>")


def sentencepiece() -> Tokenizer:
    """Words with "▁" for the space before them, bytes for everything else, one leading space stripped."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "x", "▁▁", "▁a", "▁x"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "x")]
    backend = Backend(models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend, "<s>", None)


BYTES, PIECES = byte_level(), sentencepiece()
SMOLLM2 = open_checkpoint("smollm2-135m-instruct", progress=False).tokenizer()
ALL = pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SMOLLM2], ids=["bytes", "pieces", "smollm2"])


def pieces_of(tokenizer: Tokenizer, ids: list[int], sizes: list[int] = [1], make=incremental_decoder):  # noqa: B006
    decoder, parts, begin, turn = make(tokenizer), [], 0, 0
    while begin < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(decoder.push(ids[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return [*parts, decoder.finish()]


@ALL
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text_decoded_at_once(tokenizer, text):
    ids = tokenizer.encode_without_special_parsing(text)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@ALL
def test_no_half_character_comes_out_before_the_end(tokenizer):
    ids = tokenizer.encode_without_special_parsing("한국어 🙂 é 日本語 " * 5)
    assert not any("\ufffd" in piece for piece in pieces_of(tokenizer, ids))


def test_text_comes_as_soon_as_it_is_certain():
    assert pieces_of(BYTES, BYTES.encode("aé!")) == ["a", "", "é", "!", ""]


def test_half_a_character_at_the_end_is_flushed():
    assert pieces_of(BYTES, BYTES.encode("a🙂")[:3]) == ["a", "", "", "\ufffd"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=90), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_any_bytes_at_all_give_what_decoding_at_once_gives(ids, sizes):
    for make in (incremental_decoder, WindowDecoder):
        assert "".join(pieces_of(BYTES, ids, sizes, make)) == BYTES.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, SMOLLM2.vocab_size - 1), max_size=60),
    st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_any_tokens_of_smollm2_give_what_decoding_at_once_gives(ids, sizes):
    for make in (incremental_decoder, WindowDecoder):
        assert "".join(pieces_of(SMOLLM2, ids, sizes, make)) == SMOLLM2.decode(ids)


def test_a_byte_level_vocabulary_is_decoded_without_its_tokenizer():
    assert isinstance(incremental_decoder(SMOLLM2), ByteDecoder) and isinstance(incremental_decoder(BYTES), ByteDecoder)
    assert isinstance(incremental_decoder(PIECES), WindowDecoder)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(" abx▁é한🙂\n"), max_size=60), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_any_text_survives_sentencepiece(text, sizes):
    ids = PIECES.encode_without_special_parsing(text)
    assert "".join(pieces_of(PIECES, ids, sizes)) == PIECES.decode(ids)


def test_ids_beyond_the_tokenizer_are_nothing():
    for tokenizer in (PIECES, BYTES):
        assert pieces_of(tokenizer, [tokenizer.encode("a")[0], 100_000, tokenizer.vocab_size]) == ["a", "", "", ""]


def test_control_tokens_show_only_when_asked_for():
    ids = SMOLLM2.encode("hi<|im_end|>there")
    assert "".join(pieces_of(SMOLLM2, ids)) == "hithere"
    shown = StreamDetokenizer(SMOLLM2, skip_special_tokens=False)
    assert shown.push(ids).text + shown.finish() == "hi<|im_end|>there"


@pytest.mark.parametrize("byte", [0xFF, 0xF0, 0x41])
def test_time_is_linear_in_the_number_of_tokens(byte):
    """40 times the tokens take far less than 400 times as long, also for bytes that never become a character."""
    (id,) = BYTES.encode_without_special_parsing("A") if byte == 0x41 else [next(
        i for i in range(1, 257) if TokenTexts(BYTES).bytes(i) == bytes([byte]))]

    def seconds(count: int) -> float:
        detokenizer, begin = StreamDetokenizer(BYTES, ["AAAAAAAAAAAAAAAB"]), time.perf_counter()
        for _ in range(count):
            detokenizer.push([id])
        detokenizer.finish()
        return time.perf_counter() - begin

    seconds(100)
    assert seconds(8000) < 200 * max(seconds(200), 1e-3)


# Stop strings


def said(detokenizer: StreamDetokenizer, texts: list[str], after: int = 0) -> tuple[list[str], str | None]:
    parts, stopped = [], None
    for text in texts:
        delta = detokenizer.push(BYTES.encode(text), after)
        parts.append(delta.text)
        stopped = stopped or delta.stopped
    return [*parts, detokenizer.finish()], stopped


def test_no_part_of_a_stop_string_leaks():
    parts, stopped = said(StreamDetokenizer(BYTES, ["DEFGHIJ"]), ["ABC", "DEF", "G", "HI", "J", "K"])
    assert ("".join(parts), stopped) == ("ABC", "DEFGHIJ")
    assert parts == ["ABC", "", "", "", "", "", ""]


def test_what_turns_out_to_be_no_stop_string_is_released():
    assert said(StreamDetokenizer(BYTES, ["DEFG"]), ["ABC", "DE", "X"]) == (["ABC", "", "DEX", ""], None)


def test_the_tail_is_not_lost_at_the_end():
    assert said(StreamDetokenizer(BYTES, ["##"]), ["ok", "#"]) == (["ok", "", "#"], None)


def test_the_stop_string_is_shown_when_asked_for():
    parts, _ = said(StreamDetokenizer(BYTES, ["END"], include_stop=True), ["the E", "ND of it"])
    assert "".join(parts) == "the END"


def test_tokens_behind_the_stop_string_are_not_consumed():
    delta = StreamDetokenizer(BYTES, ["cd"]).push(BYTES.encode("abcdef"))
    assert (delta.text, delta.stopped, delta.consumed) == ("ab", "cd", 4)


def test_stop_strings_are_looked_for_only_beyond_the_minimum():
    delta = StreamDetokenizer(BYTES, ["a"]).push(BYTES.encode("abcabc"), 3)
    assert (delta.text, delta.stopped, delta.consumed) == ("abc", "a", 4)


@settings(max_examples=300, deadline=None)
@given(
    st.text("abé🙂", max_size=24), st.lists(st.text("abé🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 12))
def test_the_cut_is_the_first_match_however_tokens_come(text, stops, sizes, after):
    ids = BYTES.encode_without_special_parsing(text)
    detokenizer, parts, begin, turn, consumed, stopped = StreamDetokenizer(BYTES, stops), [], 0, 0, 0, None
    while begin < len(ids) and stopped is None:
        size = sizes[turn % len(sizes)]
        delta = detokenizer.push(ids[begin : begin + size], after)
        parts.append(delta.text)
        consumed, stopped = consumed + delta.consumed, delta.stopped
        begin, turn = begin + size, turn + 1
    ends = [
        (end, stop) for end in range(1, len(text) + 1) for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop) and len(text[:end].encode()) > after
    ]
    if not ends:
        assert "".join(parts) + detokenizer.finish() == text
        assert stopped is None
    else:
        end, stop = ends[0]
        assert (stopped, "".join(parts)) == (stop, text[: end - len(stop)])
        assert consumed == len(text[:end].encode())
        assert detokenizer.finish() == ""


def test_a_token_has_its_text_bytes_and_name():
    texts = TokenTexts(PIECES)
    word, byte = PIECES.token_to_id("▁a"), PIECES.token_to_id("<0xE4>")
    assert (texts.text(word), texts.bytes(word), texts.name(word)) == (" a", b" a", " a")
    assert (texts.bytes(byte), texts.name(byte)) == (b"\xe4", "bytes:\\xe4")
