"""Text to tokens and back: a thin face of the ``tokenizers`` library, and tokenizers read from checkpoints.

Nothing here imports torch, and transformers only for checkpoints without a ``tokenizer.json``.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.modeling.token_bound import TokenBound, bound_of, byte_level_alphabet


class TokenBytes(dict[int, bytes]):
    """What each token of a byte-level vocabulary is spelled in, looked up when it is first asked for. A text is the
    bytes of its tokens joined, whatever stands beside what."""

    _ALPHABET = byte_level_alphabet()

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, id: int) -> bytes:
        token, alphabet = self._backend.id_to_token(id) or "", self._ALPHABET
        known = all(character in alphabet for character in token)
        spelled = self[id] = bytes(alphabet[character] for character in token) if known else token.encode()
        return spelled


_LONG = 2_000
"""Characters beyond which encoding must not hold up Python's other threads."""


class Tokenizer:
    """``backend`` is the ``tokenizers.Tokenizer`` (for incremental decoding); ids are those of the checkpoint.

    ``vocab_size`` counts added tokens too and may exceed or fall short of the width of the model's head. All methods
    may be called from any thread.
    """

    def __init__(self, backend: Backend, bos_token: str | None = None, eos_token: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id: int | None = self.token_to_id(bos_token) if bos_token else None
        self.eos_id: int | None = self.token_to_id(eos_token) if eos_token else None
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the greatest id."""
        self.special_ids: frozenset[int] = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Control tokens spelled out in ``text`` become their ids: for templates and raw prompts.

        ``add_special_tokens``: with the BOS (or EOS) that the checkpoint's tokenizer adds.
        """
        return _ids(self.backend, text, add_special_tokens)

    def encode_without_special_parsing(self, text: str) -> list[int]:
        """``text`` as plain text: a control token spelled out in it becomes ordinary tokens. For what users write."""
        return _ids(self._plain, text, False)

    def least_tokens(self, text: str) -> int:
        """A number that ``encode(text)`` does not go below, told without encoding it; 0 where the tokenizer's
        rules allow no such bound."""
        return self._bound.least_tokens(text) if self._bound else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids that the tokenizer does not know become nothing."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, id: int) -> str | None:
        token: str | None = self.backend.id_to_token(id)
        return token

    def token_to_id(self, token: str) -> int | None:
        id: int | None = self.backend.token_to_id(token)
        return id

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """None where a token's text depends on others, or on rules beyond bytes."""
        return TokenBytes(self.backend) if isinstance(self.backend.decoder, decoders.ByteLevel) else None

    @cached_property
    def _bound(self) -> TokenBound | None:
        return bound_of(self.backend)

    @cached_property
    def _plain(self) -> Backend:
        # The switch belongs to a backend and not to a call, so the plain reading has a backend of its own.
        plain = Backend.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        return plain


def _ids(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    # The library's ``encode`` keeps Python's lock; the form for batches gives it up.
    if len(text) <= _LONG:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def from_directory(path: Path, tokenizer_config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face directory; ConfigError where it has none."""
    bos, eos = (_content(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
    file = path / "tokenizer.json"
    if not file.is_file():
        return Tokenizer(_converted_by_transformers(path), bos, eos)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file} cannot be read as a tokenizer: {error}") from error
    add_bos, add_eos = tokenizer_config.get("add_bos_token"), tokenizer_config.get("add_eos_token")
    if add_bos is not None or add_eos is not None:
        backend.post_processor = _template(backend, bos if add_bos else None, eos if add_eos else None)
    return Tokenizer(backend, bos, eos)


def _content(token: Any) -> str | None:
    """Tokens stand in configs as strings or as the fields of an added token."""
    return token.get("content") if isinstance(token, dict) else token


def has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in ("tokenizer.json", *_OTHER_FORMATS))


_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json")


def _converted_by_transformers(path: Path) -> Backend:
    if not has_tokenizer(path):
        raise ConfigError(f"{path} has no tokenizer: expected tokenizer.json (or tokenizer.model) beside the weights")
    from transformers import AutoTokenizer

    backend: Backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer
    return backend


def _template(backend: Backend, bos: str | None, eos: str | None) -> Any:
    """A post-processor that puts ``bos`` before and ``eos`` after a text, where given."""
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(token, backend.token_to_id(token)) for token in {bos, eos} if token]
    return processors.TemplateProcessing(single=parts, special_tokens=special)


# --- GGUF ---------------------------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,), "gpt-2": (_GPT2,), "gpt2": (_GPT2,),
    "smollm": (_DIGITS, _GPT2), "starcoder": (_DIGITS, _GPT2),
    "refact": (_DIGITS, _GPT2), "codeshell": (_DIGITS, _GPT2),
    "llama3": (_LLAMA3,), "llama-v3": (_LLAMA3,), "llama-bpe": (_LLAMA3,),
    "falcon3": (_LLAMA3,), "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,), "deepseek-r1-qwen": (_QWEN2,), "megrez": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
"""How text is cut before the merges of a byte-level vocabulary apply, by ``tokenizer.ggml.pre``: one regular expression
after the other, each isolating its matches. The expressions are those of the models' published tokenizers."""

_ADDS_BOS = frozenset({"llama3", "llama-v3", "llama-bpe"})
"""Byte-level vocabularies to which llama.cpp adds BOS where the file does not say."""


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    ConfigError for another kind; ModelLoadError where the lists of tokens, types, scores and merges do not match.
    """
    try:
        return _from_gguf(metadata)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ModelLoadError(f"the GGUF file's vocabulary is damaged, convert the model again ({error!r})") from error


def _from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ConfigError(
            f"the GGUF file has a tokenizer of kind {kind!r}, supported are {sorted(builders)}: "
            "use a directory with tokenizer.json"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    backend = builders[kind](metadata, tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for type_id, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        add([AddedToken(t, normalized=False, special=type_id == _CONTROL)
             for t, type_ in zip(tokens, types, strict=True) if type_ == type_id])
    bos, eos = (_token_of(metadata, tokens, name) for name in ("bos", "eos"))
    by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _ADDS_BOS
    add_bos = bos if metadata.get("tokenizer.ggml.add_bos_token", by_default) else None
    add_eos = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if add_bos or add_eos:
        backend.post_processor = _template(backend, add_bos, add_eos)
    return Tokenizer(backend, bos, eos)


def _token_of(metadata: dict[str, Any], tokens: list[str], name: str) -> str | None:
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[id] if id is not None and 0 <= id < len(tokens) else None


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"the GGUF file asks for the pre-tokenizer {pre!r}, known are {sorted(PRE_TOKENIZERS)}: "
            "use a directory with tokenizer.json"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    backend = Backend(models.BPE(vocab=_vocabulary(tokens), merges=merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    vocabulary = _vocabulary(tokens)
    unknown = _token_of(metadata, tokens, "unknown")
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", [])] or _merges_by_score(
        vocabulary, metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens))
    backend = Backend(models.BPE(
        vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError(f"the GGUF file's vocabulary lists {len(tokens) - len(vocabulary)} tokens twice")
    return vocabulary


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose union has the best score; as a list of merges, best first."""
    merges = []
    for token, id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[id], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
