"""The real model, packed: what it answers, and what it takes. How far its distributions are from those of float32 is in
test_tolerances.py."""

import pytest

from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine
from hotswap.plugins.quantization.kernel_linear import no_kernels
from hotswap.server.llm import LLM

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
BYTES = 193.6e6 if no_kernels() else 200.4e6
"""In int8, for torch's operators or for our kernels. Its values in bfloat16, each once, are 269 MB."""


@pytest.mark.parametrize("use", ["none", "int8", "int4", "gguf"])
def test_an_engine_answers_with_it_alone_and_in_a_batch(use):
    config = {
        "model": MODEL, "dtype": "bfloat16", "device": "cpu", "max_model_len": 512, "quantization": use,
        "scheduler": {"max_batch_tokens": 256, "max_running": 16}, "kvcache": {"memory": "128MiB"}}
    questions = "How many days are in a week?", "Name the capital of France."  # no near ties in these answers
    asked = [[{"role": "user", "content": question}] for question in questions]
    with LLM(config) as llm:
        answers = llm.chat(asked * 5, max_tokens=14, temperature=0)
        answers += [llm.chat(one, max_tokens=14, temperature=0)[0] for one in asked]
    for answer, word in zip(answers, ["7 days", "Paris"] * 6, strict=True):
        assert word in answer.outputs[0].text, f"{use}: {answer.outputs[0].text}"


def test_a_rank_reports_what_its_packed_weights_take():
    built = build_engine(load_config({
        "model": MODEL, "dtype": "bfloat16", "device": "cpu", "max_model_len": 64, "quantization": "int8",
        "scheduler": {"max_batch_tokens": 64, "max_running": 2}, "kvcache": {"memory": "16MiB"}}, environ={}))
    try:
        [rank] = built.ranks()
        assert rank["weight_bytes"] == pytest.approx(BYTES, rel=0.01)
    finally:
        built.engine.stop()
