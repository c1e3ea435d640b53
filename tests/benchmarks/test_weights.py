"""One file's weights in other forms: the same model, with everything that the file told of it."""

import gguf
import numpy as np
import pytest


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.gguf"
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    tensors = {"token_embd.weight": (8, 64), "blk.0.ffn_up.weight": (16, 64), "output_norm.weight": (64,)}
    for name, shape in tensors.items():
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else "Q4_1"]
        writer.add_tensor(name, gguf.quants.quantize(draw.normal(size=shape).astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def values(file):
    return {tensor.name: (gguf.quants.dequantize(tensor.data, tensor.tensor_type), tensor.tensor_type.name)
            for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize(("kind", "embedding", "error"), [
    ("F16", "F16", 1e-3), ("BF16", "BF16", 5e-3), ("Q8_0", "Q8_0", 1e-2), ("Q4_0", "Q8_0", 0.15)])
def test_another_type_keeps_values_names_and_what_the_file_tells(source, tmp_path, kind, embedding, error):
    from benchmarks.cpu.weights import _to_gguf

    made = tmp_path / "made.gguf"
    _to_gguf(source, made, kind)
    before, after = values(source), values(made)
    assert {name: stored for name, (_, stored) in after.items()} == {
        "token_embd.weight": embedding, "blk.0.ffn_up.weight": kind, "output_norm.weight": "F32"}
    for name, (wanted, _) in before.items():
        assert np.linalg.norm(after[name][0] - wanted) <= error * np.linalg.norm(wanted)
    told, tells = gguf.GGUFReader(source).fields, gguf.GGUFReader(made).fields
    assert tells["tokenizer.ggml.tokens"].contents() == ["a", "b"] and told.keys() == tells.keys()
    assert tells["llama.context_length"].contents() == 128
    assert tells["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind}"]
