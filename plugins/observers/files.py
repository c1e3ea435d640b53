"""Where an observer's file lies when there is one observer for each engine."""

from pathlib import Path


def of_replica(path: Path, replica: str) -> Path:
    """``log.jsonl`` is ``log.1.jsonl`` for replica "1", and itself for an engine without a name."""
    return path.with_name(f"{path.stem}.{replica}{path.suffix}") if replica else path
