"""How drafts have fared since the start: what /server_info and the metrics tell of any speculator."""

from collections import Counter
from typing import Any

from hotswap.core.interfaces.messages import Verdict


class DraftCounts:
    """Added to by the loop's thread, read by any. A position counts from 0: the first draft of a row.

    ``draft_s``: seconds that workers spent on proposing, and on what a speculator does with a step's outcome.
    ``verify_s``: seconds of the target's pass and of choosing tokens, in steps with drafts.
    """

    def __init__(self) -> None:
        self._fates: Counter[tuple[int, int]] = Counter()
        """Rows by (drafted, accepted)."""
        self.draft_s = self.verify_s = 0.0
        self.dropped = 0

    def add(self, verdict: Verdict) -> None:
        durations = verdict.durations
        self.draft_s += durations.get("propose", 0.0) + durations.get("observe", 0.0)
        self.dropped += verdict.counts.get("dropped_proposals", 0)
        if fates := [(row.drafted, row.accepted) for row in verdict.rows if row.drafted]:
            self._fates.update(fates)
            self.verify_s += durations.get("forward", 0.0) + durations.get("sample", 0.0)

    @property
    def rows(self) -> int:
        """Rows that had drafts."""
        return sum(dict(self._fates).values())

    @property
    def by_position(self) -> list[tuple[int, int]]:
        """(drafted, accepted) at each position."""
        fates = dict(self._fates)
        return [
            (sum(n for (drafted, _), n in fates.items() if drafted > position),
             sum(n for (_, accepted), n in fates.items() if accepted > position))
            for position in range(max((drafted for drafted, _ in fates), default=0))
        ]

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row with drafts yields: those accepted, and the target's own."""
        fates = dict(self._fates)
        return 1 + sum(n * accepted for (_, accepted), n in fates.items()) / max(1, sum(fates.values()))

    def report(self) -> dict[str, Any]:
        positions = self.by_position
        drafted, accepted = (sum(column) for column in zip(*positions, strict=True)) if positions else (0, 0)
        return {
            "rows": self.rows, "drafted": drafted, "accepted": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_rate_by_position": [kept / said for said, kept in positions],
            "acceptance_length": self.acceptance_length if positions else None,
            "dropped_proposals": self.dropped, "draft_seconds": self.draft_s, "verify_seconds": self.verify_s,
        }
