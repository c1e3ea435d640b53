"""The engine from Python, without a server: ``LLM("examples/quickstart.yaml").generate("Once upon a time")``."""

import itertools
import json
import reprlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import EngineStoppedError, HotswapError
from hotswap.core.request import FinishReason, RequestOutput, SamplingParams
from hotswap.server.frontend import Frontend, Prompt
from hotswap.server.offline import run_all
from hotswap.server.protocol.chat import plain_messages
from hotswap.server.results import Choice, RequestResult, result_of
from hotswap.server.served import Served, served_by
from hotswap.server.text.tokens import TokenTexts

PromptLike = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_CONFIG_FILES = frozenset({".yaml", ".yml", ".toml", ".json"})
_HELD = ("served", "_frontend", "_texts")


class GenerationError(HotswapError):
    """A request ended with an error; those that ran beside it were aborted."""


class LLM:
    """A model on this machine.

    ``source``: a config file, a mapping of config keys, or just a model (catalogue name, hub id, directory, .gguf
    file). ``overrides`` go on top, dots written as double underscores: ``LLM(path, scheduler__use="static")``. A model
    may be given as ``model=``, alone or on top of a config.

    Use it as a context manager, or call :meth:`close`. Calls from several threads share the engine's batches.
    """

    _calls = itertools.count()  # of all instances, which may share an engine: request ids must differ

    def __init__(self, source: str | Path | Mapping[str, Any] | None = None, **overrides: Any) -> None:
        if source is None:
            source = overrides.pop("model", None)
        if not isinstance(source, (str, Path, Mapping)):
            raise TypeError(
                f"LLM takes a config file, a mapping of config keys, or a model's name or path; {_got(source)}")
        flags = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()]
        if not isinstance(source, Mapping) and Path(source).suffix not in _CONFIG_FILES:
            source = {"model": str(source)}
        self._attach(served_by(build_engine(load_config(source, flags))))

    @classmethod
    def of(cls, served: Served) -> "LLM":
        """For an engine that runs already."""
        llm = cls.__new__(cls)
        llm._attach(served)
        return llm

    def _attach(self, served: Served) -> None:
        self.served = served
        self._frontend = Frontend(served)
        self._texts = TokenTexts(served.tokenizer)
        self._finalizer = weakref.finalize(self, served.engine.stop)

    def generate(
        self, prompts: PromptLike | Sequence[PromptLike], sampling_params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[RequestResult]:
        """One result a prompt (text or token ids), in order. ``sampling``: fields of :class:`SamplingParams`, over the
        model's own defaults; or a ``sampling_params`` that is used as it is.

        Raises RequestError for what cannot be served, GenerationError for what fails.
        """
        return self._finish(self._batch(self._prompts(prompts), sampling_params, sampling))

    def generate_stream(
        self, prompts: PromptLike | Sequence[PromptLike], sampling_params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Iterator[RequestResult]:
        """A result each time that a prompt's choices grow, with all that there is of them so far."""
        return self._follow(self._batch(self._prompts(prompts), sampling_params, sampling))

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: SamplingParams | None = None,
        *, continue_final_message: bool = False, **sampling: Any,
    ) -> list[RequestResult]:
        """Like :meth:`generate`, for a conversation or a list of them, put into the model's chat template."""
        prompts = self._conversations(messages, continue_final_message)
        return self._finish(self._batch(prompts, sampling_params, sampling))

    def chat_stream(
        self, messages: Conversation | Sequence[Conversation], sampling_params: SamplingParams | None = None,
        *, continue_final_message: bool = False, **sampling: Any,
    ) -> Iterator[RequestResult]:
        """Like :meth:`generate_stream`, for conversations."""
        prompts = self._conversations(messages, continue_final_message)
        return self._follow(self._batch(prompts, sampling_params, sampling))

    def close(self) -> None:
        """Stop the engine and let go of it, which frees its memory at once. Safe to call twice; nothing can be
        generated afterwards."""
        self._finalizer()
        for name in _HELD:
            vars(self).pop(name, None)

    if not TYPE_CHECKING:  # for whom every name would be there

        def __getattr__(self, name: str) -> Any:
            """Asked only for what is not there: what :meth:`close` has let go."""
            if name in _HELD:
                raise EngineStoppedError("this LLM is closed; make another one")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prompts(self, prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
        one = isinstance(prompts, str) or (bool(prompts) and _is_ids(prompts))
        several: Any = [prompts] if one else prompts
        if not isinstance(several, Sequence) or isinstance(several, bytes):
            raise TypeError(f"prompts: expected a text, token ids, or a list of either; {_got(prompts)}")
        for index, prompt in enumerate(several):
            if not isinstance(prompt, str) and not _is_ids(prompt):
                raise TypeError(f"prompts[{index}]: expected a text or a list of token ids; {_got(prompt)}")
        return [
            Prompt(self._frontend.encode(prompt), prompt) if isinstance(prompt, str) else Prompt(list(prompt))
            for prompt in several
        ]

    def _conversations(self, messages: Conversation | Sequence[Conversation], continue_last: bool) -> list[Prompt]:
        several: Any = [messages] if messages and _all(messages, Mapping) else messages
        if isinstance(several, str) or not isinstance(several, Sequence) or not all(_all(c, Mapping) for c in several):
            raise TypeError(
                f"messages: expected a conversation, such as [{{'role': 'user', 'content': 'Hi'}}], or a list of them; "
                f"{_got(messages)}; a plain text is for generate()")
        return [
            Prompt(self._frontend.encode_chat(
                plain_messages(conversation), add_generation_prompt=not continue_last,
                continue_final_message=continue_last))
            for conversation in several
        ]

    def _batch(self, prompts: list[Prompt], params: SamplingParams | None, fields: dict[str, Any]) -> "_Batch":
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(
                f"sampling_params: expected one SamplingParams, for all prompts; {_got(params)}; single fields are "
                "given as keywords, as in temperature=0")
        if params is not None and fields:
            raise TypeError(f"give sampling_params or single fields ({', '.join(fields)}), not both")
        sampling = self._frontend.sampling(fields) if params is None else params
        return _Batch(self._frontend, self._texts, f"llm{next(self._calls)}", prompts, sampling)

    def _finish(self, batch: "_Batch") -> list[RequestResult]:
        for output in run_all(self.served.engine, batch.requests):
            batch.add(output)
        return [batch.result(position) for position in range(len(batch.prompts))]

    def _follow(self, batch: "_Batch") -> Iterator[RequestResult]:
        for output in run_all(self.served.engine, batch.requests):
            yield batch.result(batch.add(output))


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, kind) for value in values)


def _is_ids(prompt: Any) -> bool:
    return _all(prompt, int) and not isinstance(prompt, (str, bytes))


def _got(value: Any) -> str:
    return "got nothing" if value is None else f"got {type(value).__name__} {reprlib.repr(value)}"


class _Batch:
    """The requests of one call, and what has come of them."""

    def __init__(
        self, frontend: Frontend, texts: TokenTexts, call_id: str, prompts: list[Prompt], sampling: SamplingParams,
    ) -> None:
        self.prompts, self._texts, self._n = prompts, texts, sampling.n
        self._ids = [f"{call_id}.{position}" for position in range(len(prompts))]
        self.requests = [
            request for prompt, id in zip(prompts, self._ids, strict=True)
            for request in frontend.requests(id, [prompt], sampling)
        ]
        self._choices = [Choice(request) for request in self.requests]
        self._index = {request.id: index for index, request in enumerate(self.requests)}

    def add(self, output: RequestOutput) -> int:
        """Returns the position of the prompt."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise GenerationError(
                f"request {output.request_id} ended with {output.finish_reason.value}: {output.error or 'aborted'}")
        index = self._index[output.request_id]
        self._choices[index].add(output)
        return index // self._n

    def result(self, position: int) -> RequestResult:
        choices = self._choices[position * self._n : (position + 1) * self._n]
        return result_of(self._ids[position], self.prompts[position], choices, self._texts.text)
