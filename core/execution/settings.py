"""What a worker is told beside its parts: plain values, the same for every rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    def of(
        cls, config: "Config", checkpoint: "Checkpoint", device: str, dtype: str, max_model_len: int,
    ) -> "WorkerSettings":
        """What ``config`` says, with the ``device`` and the ``dtype`` that were chosen where it leaves them open."""
        scheduler, threads = config.scheduler, config.execution.num_threads
        return cls(
            dtype, device, max_model_len, scheduler.max_batch_tokens, scheduler.max_running, threads,
            progress=checkpoint.progress, fallback=config.model.fallback)
