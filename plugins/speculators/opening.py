"""Opening a speculator's own checkpoint, and whether it belongs to the target."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.operators import OperatorSet
from hotswap.core.interfaces.quantization import Quantization
from hotswap.core.interfaces.speculator import SpeculatorServices
from hotswap.core.modeling.checkpoint import Checkpoint, open_checkpoint
from hotswap.core.modeling.operators import TORCH_OPERATORS
from hotswap.core.modeling.packing import check_quantization

logger = logging.getLogger(__name__)

OPTION = "speculator.model"
PACKING = "speculator.quantization"
OPERATORS = "speculator.operators"


class OwnModelOptions(ComponentOptions):
    """Of a speculator with a checkpoint of its own."""

    model: str
    """The draft model or head: a directory or a hub id; a draft model may also be a .gguf file or a catalogue name."""
    revision: str | None = None
    """Of a hub id."""
    max_draft: Annotated[int, Field(ge=1)] = 4
    """Most tokens proposed a step."""
    quantization: Annotated[ComponentRef, Part("quantization")] = ComponentRef(use="none")
    """The form in which its own linear layers keep their weights."""


def open_own(source: str, revision: str | None) -> Checkpoint:
    """ConfigError, under the option's path, for what cannot be opened."""
    try:
        return open_checkpoint(source, revision=revision, progress=False)
    except ConfigError as error:
        raise type(error)(error.message, OPTION) from error


def check_vocabulary(checkpoint: Checkpoint, vocab_size: int, services: SpeculatorServices) -> None:
    """A draft must mean the same token to both: equal widths and, where both have a tokenizer, equal pieces."""
    if vocab_size != services.vocab_size:
        raise ConfigError(
            f"{checkpoint.path} has a vocabulary of {vocab_size} tokens and the target one of {services.vocab_size}; "
            "choose a checkpoint that was made for the target's tokenizer", OPTION)
    target = services.checkpoint
    if target is None or target is checkpoint or not (target.has_tokenizer and checkpoint.has_tokenizer):
        return
    ours, theirs = (c.tokenizer().backend.get_vocab(with_added_tokens=True) for c in (checkpoint, target))
    if ours != theirs:
        differing = ((id, piece) for piece, id in ours.items() if theirs.get(piece) != id)
        id, piece = min(differing, default=(-1, ""))
        what = f"token {id} is {piece!r} there and {target.tokenizer().id_to_token(id)!r} in the target" if (
            id >= 0) else f"{len(ours)} of the target's {len(theirs)} pieces are known there"
        raise ConfigError(
            f"{checkpoint.path} has another tokenizer than the target: {what}; choose a checkpoint that was made for "
            "the target's tokenizer", OPTION)


def check_context(checkpoint: Checkpoint, max_position: int, services: SpeculatorServices) -> None:
    if max_position < services.max_model_len:
        raise ConfigError(
            f"{checkpoint.path} was made for {max_position} tokens, and requests may have {services.max_model_len}; "
            f"set max_model_len to {max_position} at most, or choose another checkpoint", OPTION)


def own_quantization(
    parts: Mapping[str, Any], checkpoint: Checkpoint, model: Model | None, device: str, dtype: str,
) -> Quantization | None:
    """The part that packs the weights of ``checkpoint``, run by ``model`` or by layers of one's own; None where no
    registry gave one. ConfigError where it cannot."""
    quantization: Quantization | None = parts.get("quantization")
    if quantization is not None:
        for note in check_quantization(quantization, checkpoint, model, device, dtype, PACKING):
            logger.info(note)
    return quantization


def own_operators(parts: Mapping[str, Any], device: str, dtype: torch.dtype) -> OperatorSet:
    """The part's; torch's where no registry gave one. ConfigError, under the option's path, where the part has none."""
    if "operators" not in parts:
        return TORCH_OPERATORS
    try:
        operators: OperatorSet = parts["operators"].bind(device, dtype)
    except ConfigError as error:
        raise type(error)(error.message, OPERATORS) from error
    return operators
