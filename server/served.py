"""An engine, and what its front (HTTP, Python, batch files) must know of the model behind it."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.config import ResolvedConfig
from hotswap.core.config.describe import public_name
from hotswap.core.engine.clock import Clock, SystemClock
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import RequestOptions
from hotswap.core.interfaces.deployment import EngineClient
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.request import PROCESSED_FIELDS

if TYPE_CHECKING:
    from hotswap.core.engine.build import Built
    from hotswap.core.engine.exchange import Report

logger = logging.getLogger(__name__)

_FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


def _nothing(app: Any) -> None:
    """No observer has routes."""


def _refuse(sets: Sequence[str], replica: str | None) -> list["Report"]:
    raise ConfigError("this engine exchanges no parts")


@dataclass(frozen=True)
class Served:
    """``vocab_size`` is the width of the logits. ``eos_token_ids`` lie below it. ``sampling_defaults`` hold where a
    request says nothing. ``capacity``: most requests that can run and wait at a time, None where nothing limits them.
    ``describe`` lists the live components, ``install_routes`` lets observers add their routes,
    ``exchange`` is :meth:`Built.exchange`."""

    name: str
    engine: EngineClient
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    cache_key: CacheKey = CacheKey()
    chat_template: str | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    request_options: Mapping[str, type[RequestOptions]] = field(default_factory=dict)
    honoured: frozenset[str] = PROCESSED_FIELDS
    seed: int = 0
    capacity: int | None = None
    clock: Clock = field(default_factory=SystemClock)
    describe: Callable[[], dict[str, Any]] = dict
    install_routes: Callable[[Any], None] = _nothing
    exchange: Callable[[Sequence[str], str | None], "list[Report]"] = _refuse


def defaults_of(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults that a model's generation_config.json states. ``do_sample: false`` is greedy."""
    defaults = {
        key: generation_config[key] for key in _FROM_GENERATION_CONFIG if generation_config.get(key) is not None}
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


@contextlib.contextmanager
def loaded(resolved: ResolvedConfig, *, progress: bool = True) -> Iterator["Built"]:
    """A running engine, stopped at the end. Logs how long loading took, and what there is to know about the config."""
    from hotswap.core.engine.build import build_engine

    clock = SystemClock()
    begin = clock.now()
    built = build_engine(resolved, progress=progress)
    logger.info("loaded %s in %.1f s", resolved.config.model.source, clock.now() - begin)
    try:
        for warning in built.warnings:
            logger.warning("%s", warning)
        for note in built.notes:
            logger.info("%s", note)
        yield built
    finally:
        built.engine.stop()


def served_by(built: "Built") -> Served:
    """What a running engine serves. ConfigError where ``server.chat_template`` cannot be read."""
    config, checkpoint = built.resolved.config, built.checkpoint
    return Served(
        name=config.server.served_model_name or public_name(config.model.source),
        engine=built.engine, tokenizer=checkpoint.tokenizer(), vocab_size=built.facts.vocab_size,
        max_model_len=built.max_model_len, eos_token_ids=checkpoint.eos_token_ids(built.facts.vocab_size),
        cache_key=CacheKey(model_revision=checkpoint.revision, dtype=config.dtype),
        chat_template=_template(config.server.chat_template) or checkpoint.chat_template,
        sampling_defaults=defaults_of(checkpoint.generation_config) if config.server.generation_config else {},
        request_options=built.request_options, honoured=built.honoured, seed=config.seed,
        capacity=(config.scheduler.max_running + config.server.max_queue) * max(1, len(built.engine.engines())),
        describe=lambda: {
            "components": built.listing(), "config": built.effective(),
            **({"replica_configs": own} if (own := built.deviations()) else {}),
            "notes": [*built.warnings, *built.notes], "ranks": built.ranks(),
        },
        install_routes=lambda app: built.install_routes(app), exchange=built.exchange,
    )


def _template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file!r} cannot be read: {error}", "server.chat_template") from error
