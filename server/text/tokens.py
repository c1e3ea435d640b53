"""Single tokens as text and as bytes, for logprobs."""

import re

from hotswap.core.modeling.token_bound import byte_level_alphabet
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.server.text.detokenizer import REPLACEMENT

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Remembers each token's text; bounded by the vocabulary."""

    _ALPHABET = byte_level_alphabet()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Behind another token, since some tokenizers strip the first token's leading space.
        self._before = tokenizer.encode_without_special_parsing("a")[-1:]
        self._skip = len(tokenizer.decode(self._before, skip_special_tokens=False))
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """As decoded behind other text; part of a character is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)[self._skip :]
            self._texts[token_id] = text
        return text

    def bytes(self, token_id: int) -> bytes:
        """The token's own bytes, also where they are only part of a character."""
        text = self.text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if all(character in self._ALPHABET for character in piece):
            return bytes(self._ALPHABET[character] for character in piece)
        return text.encode()

    def name(self, token_id: int) -> str:
        r"""A text that tells tokens apart: part of a character is written ``bytes:\xe4``, as OpenAI does."""
        text = self.text(token_id)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))
