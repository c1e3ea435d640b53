"""One arm alone: how fast is this, without anything to compare it with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import isfinite
from typing import Any

from tqdm import tqdm

from hotswap.core.config import ResolvedConfig
from hotswap.core.config.check import check_config
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import ConfigError, HotswapError
from hotswap.core.explain import redact
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.workload import Workload
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.registry import Registry
from hotswap.lab.load import Load, Numbered, run_load
from hotswap.lab.metrics import METRICS, Slo, failed, values_of
from hotswap.lab.processes import Neighbours
from hotswap.lab.records import BlockRecord
from hotswap.lab.renewal import Renewal
from hotswap.lab.requests import (
    check_limits,
    check_sampling,
    check_workload,
    context_of,
    endless,
    length_of,
    timed,
)
from hotswap.lab.targets.engine import EngineTarget
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.lab.targets.target import Target

WINDOW_BAR = "{desc}: {percentage:3.0f}%|{bar}| {remaining} left"
POOL_ITEMS = 64
"""Of so many requests the tokens are known from which new beginnings are drawn."""


@dataclass(frozen=True)
class Bench:
    """``config``: an engine of ours, started here, or, where there is an ``endpoint``, the model that is served there.
    ``requests`` are sent, or as many as fit into ``seconds``. ``warm_up`` requests before them do not count."""

    config: ResolvedConfig | None
    endpoint: Endpoint | None
    workload: ComponentRef
    load: Load
    requests: int
    seconds: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    slo: Slo = Slo({})
    seed: int = 0
    warm_up: int = 4

    def run(self, now: Callable[[], float], say: Callable[[str], None], *, progress: bool = True) -> "Measured":
        """ConfigError before anything is loaded for what cannot work."""
        workload: Workload = Registry().build("workload", self.workload, "workload")
        check_sampling(self.sampling, ours=self.endpoint is None)
        check_limits(self.slo, servers=self.endpoint is not None)
        configs = [] if self.config is None else [self.config]
        for config in configs:
            check_config(config.config, Registry())
        told = [] if self.endpoint is None else [length_of(self.endpoint)]
        context, tokenizer = context_of(self.seed, configs, told, progress)
        check_workload(workload, context, self.load, filling=self.seconds is not None and timed(self.load))
        items: Iterator[Numbered] = enumerate(endless(workload, context))
        with closing(self._target(tokenizer, now, progress)) as target:
            say(f"a request says: {dict(target.effective())}")
            if not target.can_reset:
                items = Renewal(islice(enumerate(endless(workload, context)), POOL_ITEMS))(items, "bench")
            self._warm_up(target, items, now)
            return self._measure(target, items, now, progress)

    def _warm_up(self, target: Target, items: Iterator[Numbered], now: Callable[[], float]) -> None:
        stretch = run_load(target, list(islice(items, self.warm_up)), self.load, now, name="warm-up")
        bad = failed(stretch.records)
        if (problem := target.problem()) is not None:
            raise BenchError(f"it died while warming up: {problem}")
        if bad and len(bad) == len(stretch.records):
            raise BenchError(f"no request was answered while warming up: {bad[0].error}")
        if stretch.broken is not None:
            raise BenchError(f"while warming up {stretch.broken}")
        try:
            target.reset()
        except HotswapError as error:
            raise BenchError(f"its cache could not be emptied after warming up: {error}") from error

    def _target(self, tokenizer: Tokenizer | None, now: Callable[[], float], progress: bool) -> Target:
        if self.endpoint is not None:
            decode = None if tokenizer is None else lambda ids: tokenizer.decode(list(ids))
            server = OpenAITarget(replace(self.endpoint, decode=decode), now)
            server.require_reset()
            return server
        if self.config is None:
            raise ConfigError("give a config, or the address of a server with --url")
        built = build_engine(self.config, progress=progress)
        try:
            return EngineTarget(built, self.sampling, now)
        except BaseException:
            built.engine.stop()
            raise

    def _measure(
        self, target: Target, items: Iterator[Numbered], now: Callable[[], float], progress: bool,
    ) -> "Measured":
        chosen = items if self.seconds is not None else iter(list(islice(items, self.requests)))
        neighbours, begin = Neighbours(now), now()

        def show(count: int) -> None:
            bar.update((count if self.seconds is None else min(self.seconds, now() - begin)) - bar.n)

        windowed = self.seconds is not None
        with tqdm(
            total=self.seconds or self.requests, desc="seconds" if windowed else "requests", unit="",
            bar_format=WINDOW_BAR if windowed else None, disable=None if progress else True,
        ) as bar:
            target.begin()
            stretch = run_load(
                target, chosen, self.load, now, name="bench", seed=self.seed, window=self.seconds, on_ended=show)
            activity = target.finish()
        block = BlockRecord(
            "bench", 0, 0, stretch.wall, stretch.records, activity.cpu, activity.engine, tuple(activity.timeline),
            neighbours.cores())
        return Measured(block, self._shortfall(block, stretch.broken or target.problem()))

    def _shortfall(self, block: BlockRecord, why: str | None) -> str | None:
        because = f": {why}" if why else ""
        if self.seconds is not None:
            early = block.wall < self.seconds
            return f"it ended after {block.wall:.3g} of {self.seconds:g} seconds{because}" if early else None
        whole = sum(not record.incomplete for record in block.requests)
        return f"it ended after {whole} of {self.requests} requests{because}" if whole < self.requests else None

    def told(self) -> dict[str, Any]:
        """What was measured: the effective config, secrets hidden, or which server; and the load."""
        engine = {} if self.config is None else {"config": self.config.effective()}
        server = {} if self.endpoint is None else {"url": self.endpoint.url, "model": self.endpoint.model}
        return {
            **engine, **server, "workload": self.workload.model_dump(mode="json"), "load": asdict(self.load),
            "requests": None if self.seconds is not None else self.requests, "seconds": self.seconds,
            "sampling": redact(dict(self.sampling)), "slo": dict(self.slo.limits), "seed": self.seed,
            "warm_up": self.warm_up}


@dataclass(frozen=True)
class Measured:
    """``shortfall``: what is missing, and why, where it ended before its time: the server died, the workload ended, or
    the user interrupted it."""

    block: BlockRecord
    shortfall: str | None


class BenchError(HotswapError):
    """There is nothing to measure."""


def as_json(measured: Measured, slo: Slo) -> dict[str, Any]:
    """All that was measured, and what it means. What is without bound is "inf": JSON has no infinity."""
    block = measured.block
    values = {name: value if isfinite(value) else str(value) for name, value in values_of(block, slo).items()}
    return {
        "partial": measured.shortfall,
        "metrics": {
            spec.name: {"value": values[spec.name], "unit": spec.unit, "formula": spec.formula}
            for spec in METRICS if spec.name in values},
        "block": asdict(block),
    }
