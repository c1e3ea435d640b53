"""The real model: our dequantised load against transformers' forward pass on the same tensors."""

import pytest
import torch

pytestmark = pytest.mark.real_model


def test_logits_equal_transformers(reference):
    ours = reference.load_decoder("smollm2-135m-instruct")
    theirs = reference.smollm2_reference()
    ids = torch.randint(0, 49152, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = reference.transformers_logits(theirs, ids)
    torch.testing.assert_close(reference.logits_of(ours, ids), expected, atol=5e-4, rtol=0)
    torch.testing.assert_close(reference.logits_of(ours, ids, [30, 1, 1, 48]), expected, atol=5e-4, rtol=0)
