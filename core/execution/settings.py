"""What a worker is told beside its parts: plain values, the same for every rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotswap.core.execution.device import choose_device, choose_dtype
from hotswap.core.execution.static import GraphKey

if TYPE_CHECKING:
    from hotswap.core.config import Config
    from hotswap.core.modeling.checkpoint import Checkpoint


@dataclass(frozen=True)
class WorkerSettings:
    """``dtype`` and ``device`` are torch's names. ``num_threads``: None leaves torch's choice. ``memory_fraction``: how
    much of the memory that is free once weights are loaded may go to cache and activations. ``graphs``: the steps to
    capture; ``needs_graphs``: a worker that cannot is refused. ``progress``: show bars where stderr is a terminal.
    ``fallback``: the component for a speculator's model of an architecture that has none."""

    dtype: str
    device: str
    max_model_len: int
    max_batch_tokens: int
    max_running: int
    num_threads: int | None = None
    memory_fraction: float = 0.85
    graphs: tuple[GraphKey, ...] = ()
    needs_graphs: bool = False
    progress: bool = False
    fallback: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "graphs", tuple(GraphKey(*key) for key in self.graphs))  # from JSON they come as lists

    @classmethod
    def choose(
        cls, config: "Config", checkpoint: "Checkpoint", max_model_len: int, notes: list[str],
    ) -> "WorkerSettings":
        """Resolve what the config leaves to us; ``notes`` gets each choice with its reason. ConfigError."""
        device = choose_device(config.device, notes)
        dtype = choose_dtype(config.dtype, checkpoint.config, device, notes)
        scheduler, threads = config.scheduler, config.execution.num_threads
        return cls(
            dtype, device, max_model_len, scheduler.max_batch_tokens, scheduler.max_running, threads,
            progress=checkpoint.progress, fallback=config.model.fallback)
