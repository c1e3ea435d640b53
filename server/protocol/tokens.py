"""``/tokenize`` and ``/detokenize``, with vLLM's fields."""

from hotswap.server.protocol.chat import ChatPrompt
from hotswap.server.protocol.common import Body, Id


class TokenizeText(Body):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatPrompt):
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: list[Id]
