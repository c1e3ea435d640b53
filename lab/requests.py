"""The requests of a run: what a workload may know of the model, and its stream for as long as it is needed."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from hotswap.core.config import ResolvedConfig
from hotswap.core.engine.build import open_model
from hotswap.core.errors import ConfigError, RequestError
from hotswap.core.explain import join
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.registry import Registry
from hotswap.lab.load import Load, OpenLoop
from hotswap.lab.metrics import Slo
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.server.frontend import sampling_of
from hotswap.server.templates.chat import ChatTemplate

CHECKED_ITEMS = 1000
"""So many requests of a workload are looked at before anything is loaded."""
AT_ONCE = 100_000
"""Of a workload that has so many requests at one moment nobody waits for the end, which may not come."""
FOREIGN_VOCABULARY = 1000
"""Ids below this are words or parts of words in every vocabulary that we know of."""
FOREIGN_LENGTH = 2048
"""The context of a server that does not tell."""
_NOT_FOR_SAMPLING = {
    "max_tokens": "the workload says how long answers are", "n": "a request is measured as one answer",
    "stream": "answers are always streamed", "prompt": "it comes from the workload",
}


def length_of(endpoint: Endpoint) -> int | None:
    """Of the context of a server's model; None where it does not tell. ConfigError where the server does not answer, or
    does not serve that model."""
    told = OpenAITarget(endpoint, lambda: 0.0).probe().get("max_model_len")
    return int(told) if told else None


def context_of(
    seed: int, configs: Iterable[ResolvedConfig], told: Iterable[int | None], progress: bool,
) -> tuple[WorkloadContext, Tokenizer | None]:
    """What a workload may know: of our model, or of a foreign one. And the model's tokenizer, where it is ours to have.
    ``told``: the lengths of servers' contexts, as far as they tell."""
    lengths = [length for length in told if length is not None]
    opened = [open_model(one.config, Registry(), progress=progress) for one in configs]
    if not opened:
        return foreign_context(seed, min(lengths, default=FOREIGN_LENGTH)), None
    checkpoint, vocab_size = opened[0].checkpoint, opened[0].facts.vocab_size
    length = min([one.max_model_len for one in opened] + lengths)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template
    if template is None:
        return WorkloadContext(seed, vocab_size, length, tokenizer.encode), tokenizer
    chat = ChatTemplate(template, tokenizer)

    def encode_chat(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return chat.encode(
            messages, add_generation_prompt=True, continue_final_message=False, variables=None,
            check_length=lambda text: None)

    return WorkloadContext(seed, vocab_size, length, tokenizer.encode, encode_chat), tokenizer


def foreign_context(seed: int, max_model_len: int, vocab_size: int = FOREIGN_VOCABULARY) -> WorkloadContext:
    """Of a server whose tokenizer we do not have."""
    def encode(text: str) -> list[int]:
        raise ConfigError(
            "it has texts, and there is no tokenizer to make tokens of them; give a base config with the model that "
            "the server has", "workload")
    return WorkloadContext(seed, vocab_size, max_model_len, encode)


def endless(workload: Workload, context: WorkloadContext) -> Iterator[WorkItem]:
    """The workload's requests, for ever: one that ends begins again with the next seed, and where it has times of its
    own, behind its last request by the mean distance of those before. Turns count as if answers took no time."""
    seed, count, begin = context.seed, 0, 0.0
    while True:
        first, due = count, array("d")  # of every request, since any may be waited for: packed, a pass may not end
        for item in workload.items(replace(context, seed=seed)):
            count += 1
            due.append((item.at or 0.0) if item.after is None else due[item.after] + item.pause)
            yield replace(
                item, at=None if item.at is None else item.at + begin,
                after=None if item.after is None else item.after + first)
        if not due:
            raise ConfigError("it has no requests", "workload")
        extent = max(due) - due[0]
        seed, begin = seed + 1, begin + extent + extent / max(1, len(due) - 1)


def timed(load: Load) -> bool:
    """Whether requests are due at the workload's own times."""
    return isinstance(load, OpenLoop) and load.arrivals == "workload"


def check_workload(workload: Workload, context: WorkloadContext, load: Load, filling: bool = False) -> None:
    """The first requests fit into the shortest context, and say when they are due where the load asks for that.
    ``filling``: they are to fill a stretch of time, which those that are all due at once never do, however often they
    begin again."""
    for index, item in enumerate(islice(endless(workload, context), CHECKED_ITEMS)):
        if timed(load) and item.at is None and item.after is None:
            raise ConfigError(
                f"{workload.label} has no times of its own, as traces have; give a rate, or a concurrency",
                "load.arrivals")
        if not item.prompt or len(item.prompt) + item.max_tokens > context.max_model_len:
            raise ConfigError(
                f"request {index} has {len(item.prompt)} tokens and asks for {item.max_tokens}, but the context of the "
                f"shortest arm holds {context.max_model_len}; make it shorter, or raise max_model_len", "workload")
    if filling and not _has_extent(workload, context):
        raise ConfigError(
            "its requests are all due at once, and fill no stretch of time; give a number of requests, a rate or a "
            "concurrency", "workload")


def _has_extent(workload: Workload, context: WorkloadContext) -> bool:
    """Whether any request is due at another time than the first, be it a turn behind a pause."""
    items = iter(workload.items(context))
    first = next(items).at
    return any(item.at != first if item.after is None else item.pause for item in islice(items, AT_ONCE))


def check_limits(slo: Slo, servers: bool) -> None:
    """ConfigError for a limit that would always be kept. ``servers``: somebody is spoken to over HTTP."""
    if servers and "queue" in slo.limits:
        raise ConfigError("a server does not tell how long each request has waited; limit ttft instead", "slo.queue")


def check_sampling(fields: Mapping[str, Any], ours: bool) -> None:
    """``ours``: an engine of ours gets them. Other servers may know more fields, and judge them themselves."""
    for name, why in _NOT_FOR_SAMPLING.items():
        if name in fields:
            raise ConfigError(f"{why}; leave it out", join("sampling", name))
    if ours:
        try:
            sampling_of(fields)
        except RequestError as error:
            raise ConfigError(str(error), "sampling") from error
