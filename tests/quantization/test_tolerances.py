"""How far each dtype and each form of the weights may be from float32 and the file's own weights, on the real model:
one table, here and in docs/quantization.md."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.core.testing.dense import logits_of
from hotswap.core.testing.quantization import held_bytes
from hotswap.core.testing.rig import build
from hotswap.plugins.quantization.kernel_linear import no_kernels

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
STEPS = [256, *[3] * 21, 1]
"""Tokens of each: forms may differ by the number of rows."""


class Allowed(NamedTuple):
    """``error``: of any logit; they are between -36 and 42 here. ``kl``: mean divergence of the next token's
    distribution, in nats. ``agreement``: least share of positions with the same most likely token."""

    error: float
    kl: float
    agreement: float


TOLERANCES = {
    ("float32", "int8", "kernels"): Allowed(8.0, 0.02, 0.92),
    ("float32", "int4", "kernels"): Allowed(4.0, 0.01, 0.93),
    ("float32", "gguf", "kernels"): Allowed(4.0, 0.01, 0.93),
    ("bfloat16", "none", ""): Allowed(4.0, 0.005, 0.95),
    ("bfloat16", "int8", "kernels"): Allowed(7.0, 0.02, 0.9),
    ("bfloat16", "int8", "spans"): Allowed(7.0, 0.02, 0.9),
    ("bfloat16", "int4", "kernels"): Allowed(5.0, 0.015, 0.91),
    ("bfloat16", "gguf", "kernels"): Allowed(5.0, 0.015, 0.91),
    ("bfloat16", "int8", "torch"): Allowed(40.0, 0.16, 0.75),
    ("bfloat16", "int4", "torch"): Allowed(40.0, 0.16, 0.75),
    ("bfloat16", "gguf", "torch"): Allowed(40.0, 0.16, 0.75),
}
"""Of a dtype and a quantization, and of who multiplies (``spans``: our kernels, in groups of 192), against float32
with ``none``: about twice what was measured. The file's matrices are of 4 bits already, which int4 finds again. torch's
operators have one scale for a whole row of activations, which outliers set."""


def loaded(dtype, use, **options):
    """The model, and the bytes that it says its weights take."""
    checkpoint, model = open_checkpoint(MODEL, progress=False), build("model", "LlamaForCausalLM")
    model.build(checkpoint.config, LOCAL_MESH, getattr(torch, dtype), "cpu")
    with checkpoint.weights() as weights:
        weights.quantization = build("quantization", use, **options)
        model.load(weights)
    return model, weights.num_bytes(getattr(torch, dtype))


@pytest.fixture(scope="module")
def text():
    """The licence, a text that stays as it is."""
    words = (ROOT / "LICENSE").read_text("utf-8").split()
    return open_checkpoint(MODEL, progress=False).tokenizer().encode(" ".join(words))[: sum(STEPS)]


@pytest.fixture(scope="module")
def reference(text):
    return logits_of(loaded("float32", "none")[0], text)


def measured(model, text, reference):
    found = logits_of(model, text, STEPS).float()
    ours, theirs = found.log_softmax(-1), reference.log_softmax(-1)
    return Allowed(
        float((found - reference).abs().max()), float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        float((found.argmax(-1) == reference.argmax(-1)).float().mean()))


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "use", "by"), TOLERANCES)
def test_logits_stay_as_near_to_float32_as_the_table_says(dtype, use, by, text, reference):
    """In less memory than the file takes in bfloat16, forms for many rows included."""
    if by in ("kernels", "spans") and no_kernels():
        pytest.skip(no_kernels())
    allowed, options = TOLERANCES[dtype, use, by], {"torch": {"kernels": "torch"}, "spans": {"group_size": 192}}
    model, num_bytes = loaded(dtype, use, **options.get(by, {}))
    found = measured(model, text, reference)
    assert found.error <= allowed.error and found.kl <= allowed.kl and found.agreement >= allowed.agreement, str(found)
    owned = held_bytes([model.embedding, model.layers, model.norm, model.lm_head])
    assert num_bytes == pytest.approx(owned, rel=0.01), "it says otherwise than it owns"
    if dtype == "bfloat16":
        weights = open_checkpoint(MODEL, progress=False).weights()
        sizes = {name: 2 * torch.Size(weights.shape(name)).numel() for name in weights.names()}
        most = sum(sizes.values())
        if use == "none":  # what is prepacked has the vocabulary's matrix twice
            most += sizes["model.embed_tokens.weight"] + 1
        assert owned < most, f"{owned / 1e6:.1f} MB of {most / 1e6:.1f}"


def test_the_page_has_the_same_table():
    text = (ROOT / "docs/quantization.md").read_text("utf-8")
    rows = re.findall(
        r"^\| `(float32|bfloat16)` \| `(\w+)` \| (\w*) ?\| ([\d.]+) .*\| ([\d.]+) .*\| ([\d.]+) % .*\|$", text,
        re.MULTILINE)
    stated = {
        (dtype, use, by): Allowed(float(error), float(kl), float(share) / 100)
        for dtype, use, by, error, kl, share in rows}
    assert stated.keys() == TOLERANCES.keys()
    for key, allowed in TOLERANCES.items():
        assert stated[key] == pytest.approx(allowed), key
