"""An observer: watches an engine through hooks."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import ComponentOptions

logger = logging.getLogger(__name__)


class MyPart(Observer):
    """Logs each step that takes longer than it should, and how many requests it held up.

    Choose it ... (say when: `hotswap plugins show observer:mypart` prints this).
    """

    class Options(ComponentOptions):
        seconds: Annotated[float, Field(gt=0)] = 1.0
        """A step may take so long."""

    @hookimpl
    def hotswap_step_finished(self, requests: Sequence[Any], duration: float) -> None:
        """A hook takes whichever of its arguments it names. It is called from the loop's thread: do not block."""
        if duration > self.options.seconds:
            logger.warning("a step of %d requests took %.2f s", len(requests), duration)
