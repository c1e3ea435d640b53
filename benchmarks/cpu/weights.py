"""The weights of one GGUF file in the forms that other engines read: what is compared are engines, not models.

A folder of transformers in bfloat16 (and its dequantised tensors are rounded once), and GGUF files of other types.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotswap.core.errors import ConfigError
from hotswap.core.modeling import catalogue

NAME = "smollm2"
GGUF_TYPES = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
EMBEDDING = "token_embd.weight"
"""Also the head of a model whose ends are tied; quantised files keep it at 8 bits."""


def convert(model: str, home: Path) -> Iterator[Path]:
    """Each form that is not there yet, made; all of them are told."""
    source = catalogue.find(model) if model in catalogue.CATALOGUE else Path(model)
    if not source.is_file():
        raise ConfigError(f"there is no file {model!r}; give a .gguf file or a catalogue name", "--model")
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{NAME}-bf16"
    if not folder.exists():
        _write_whole(folder, lambda path: _to_transformers(source, path))
    yield folder
    for name, kind in GGUF_TYPES.items():
        file = home / f"{NAME}-{name}.gguf"
        if not file.exists():
            _write_whole(file, lambda path, kind=kind: _to_gguf(source, path, kind))
        yield file


def _write_whole(path: Path, write: Any) -> None:
    """So that what is interrupted is not taken for done."""
    part = path.with_name(f"{path.name}.part")
    if part.is_dir():
        shutil.rmtree(part)
    write(part)
    part.rename(path)


def _to_transformers(source: Path, folder: Path) -> None:
    """It refuses to save what it has read of a GGUF file: a second model takes its tensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = type(read.config)(**{
        key: value for key, value in read.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "model_type", "transformers_version", "dtype")})
    model = type(read)(config).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _to_gguf(source: Path, file: Path, kind: str) -> None:
    """Vectors stay as they are. Everything that the file tells of the model is copied, but for its type."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(file, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            value_type, *sub = field.types
            writer.add_key_value(field.name, field.contents(), value_type, sub_type=sub[-1] if sub else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        wanted = gguf.GGMLQuantizationType[kind]
        if tensor.name == EMBEDDING and kind.startswith("Q"):
            wanted = gguf.GGMLQuantizationType.Q8_0
        if len(tensor.shape) == 1:
            wanted = gguf.GGMLQuantizationType.F32
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        packed = gguf.quants.quantize(values, wanted)
        writer.add_tensor(tensor.name, packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
