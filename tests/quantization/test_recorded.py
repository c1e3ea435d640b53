"""A layer in any form of weights can be recorded and replayed: by kernels of our own, and by torch's operators."""

import pytest
import torch

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.testing.quantization import random_rows
from hotswap.core.testing.rig import build

pytest.importorskip("numba")

from hotswap.plugins.cpu.recording import StepRecorder  # it imports numba

BFLOAT16 = torch.bfloat16
FORMS = {
    "none": {}, "none, as it is": {"prepack": False}, "none, torch": {"kernels": "torch"},
    "int8": {}, "int8, 192": {"group_size": 192}, "int8, torch": {"kernels": "torch"}, "int4": {},
    "int4, torch": {"kernels": "torch"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_replayed_layer_gives_the_bits_of_an_eager_one(form, rows):
    weight = LinearWeight(("test",), (random_rows(96, 384, 1).to(BFLOAT16),), None, BFLOAT16, "cpu")
    layer = build("quantization", form.partition(",")[0], **FORMS[form]).pack(weight)
    x, out = random_rows(rows, 384, 2).to(BFLOAT16), torch.zeros(rows, 96, dtype=BFLOAT16)
    with torch.inference_mode():
        replay = StepRecorder().capture(lambda: out.copy_(layer(x)))
        for seed in (3, 4):
            x.copy_(random_rows(rows, 384, seed))
            layer(random_rows(200, 384, 5).to(BFLOAT16))  # more rows, for which a thread keeps more memory
            replay()
            assert torch.equal(out, layer(x))
