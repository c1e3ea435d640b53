"""Whether a quantization can pack a checkpoint's weights, before any of them is read."""

from typing import TYPE_CHECKING

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.quantization import Quantization, QuantizationSupport

if TYPE_CHECKING:
    from hotswap.core.modeling.checkpoint import Checkpoint


def check_quantization(
    quantization: Quantization, checkpoint: "Checkpoint", model: Model | None, device: str, dtype: str,
    path: str = "quantization",
) -> list[str]:
    """What the operator should know of the choice. ConfigError, under the config ``path``, for what does not fit.

    ``model``: whose layers are packed; None: they are a component's own, which take any form.
    """
    try:
        support = quantization.support()
    except ConfigError as error:
        raise type(error)(error.message, error.path or path) from error
    _check_place(quantization, support, device, dtype, path)
    if model is not None:
        _check_model(quantization, model, path)
    formats = checkpoint.block_formats
    if support.needs_blocks and not formats:
        raise ConfigError(
            f"{quantization.label} keeps the quantised blocks of a GGUF file, and {checkpoint.path} has none; choose "
            "another quantization, or a .gguf file that is quantised", path)
    note = quantization.note(device, dtype)
    notes = [f"{path}: {note}"] if note else []
    if support.needs_blocks and (others := sorted(formats - set(support.blocks))):
        notes.append(
            f"{path}: {quantization.label} has no path of its own for {', '.join(others)}, so that those weights are "
            f"dequantised; it has for {', '.join(support.blocks)}")
    return notes


def _check_place(
    quantization: Quantization, support: QuantizationSupport, device: str, dtype: str, path: str,
) -> None:
    given = (("device", device.partition(":")[0], support.devices), ("dtype", dtype, support.dtypes))
    for what, value, allowed in given:
        if allowed is not None and value not in allowed:
            raise ConfigError(
                f"{quantization.label} does not take the {what} {value}, but {', '.join(allowed)}; change {what}, or "
                "choose another quantization", path)


def _check_model(quantization: Quantization, model: Model, path: str) -> None:
    offered = model.describe().offers
    for need in quantization.describe().requires:
        if Model.kind in need.kinds and need.capability not in offered:
            raise ConfigError(
                f"{quantization.label} requires '{need.capability}' of the model: {need.why.rstrip('.')}. "
                f"{model.label} offers {', '.join(sorted(offered)) or 'nothing'}; change {need.remedy or path}", path)
