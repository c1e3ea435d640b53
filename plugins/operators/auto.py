"""Operators by what there is."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
from hotswap.core.interfaces.operators import Operators, OperatorSet

logger = logging.getLogger(__name__)


class AutoOptions(ComponentOptions):
    candidates: Annotated[list[ComponentRef], Part("operators"), Field(min_length=1)] = [
        ComponentRef(use="cpu"), ComponentRef(use="torch")]
    """The best first: the first that has operators for the device and dtype is taken."""


class FirstThatFits(Operators):
    """The first of several that has operators for the device and dtype. The log says which, and why none before it.

    The default. Name one of them instead where a start is to fail rather than to go on with less.
    """

    Options = AutoOptions

    def bind(self, device: str, dtype: torch.dtype) -> OperatorSet:
        candidates: Sequence[Any] = self.parts["candidates"]
        reasons = []
        for candidate in candidates:
            try:
                operators: OperatorSet = candidate.bind(device, dtype)
            except ConfigError as error:
                reasons.append(error.message)
                continue
            logger.info("operators: %s%s", candidate.name, f" ({'; '.join(reasons)})" if reasons else "")
            return operators
        raise ConfigError(f"there are no operators for {dtype} on {device}: {'; '.join(reasons)}", "model.operators")
