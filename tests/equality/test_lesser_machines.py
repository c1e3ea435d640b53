"""On a machine that lacks something the next best path serves, with the tokens of transformers, and says why once.

Quantised weights on such machines are in ``tests/quantization/test_choices.py``."""

import errno
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

import pytest

from hotswap.plugins.cpu import team

SERVE = """
import json, os, sys, threading

given = json.load(sys.stdin)
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given["cores"]])

import torch

if given["capabilities"] is not None:
    torch.cpu.get_capabilities = lambda: dict.fromkeys(given["capabilities"], True)

from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine
from hotswap.core.request import Request, SamplingParams

built, done = build_engine(load_config(given["config"], environ={}), progress=False), threading.Semaphore(0)
outputs = {str(index): [] for index in range(len(given["prompts"]))}

def sink(output):
    outputs[output.request_id] += output.token_ids
    if output.finish_reason:
        done.release()

sampling = SamplingParams(temperature=0, max_tokens=given["max_tokens"], ignore_eos=True)
for name, prompt in zip(outputs, given["prompts"]):
    built.engine.add(Request(name, prompt, sampling), sink)
for _ in outputs:
    assert done.acquire(timeout=60), built.engine.health()
built.engine.stop()
print(json.dumps({"outputs": list(outputs.values()), "notes": built.notes, "threads": torch.get_num_threads()}))
"""

OLD_KERNELS = """
from hotswap.core.testing.attention import AttentionCase, check_attention
from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.cpu.attention_kernels import attend_bfloat16

check_attention(CPUAttention(), AttentionCase(
    "mixed", rows=((1, 300), (17, 20), (5, 4)), head_dim=72, dtype="bfloat16"))
assert "zmm" not in attend_bfloat16._compiled._library.get_asm_str()
"""


@pytest.fixture
def serve(book: Any, tiny: Any) -> Any:
    """``serve(config, code, cores, capabilities, **environment)``: what a process of its own has told, whose tokens are
    transformers' and which runs ``code`` in the end."""

    def start(
        config: dict[str, Any], code: str = "", cores: int = 2, capabilities: list[str] | None = None,
        **environment: str,
    ) -> dict[str, Any]:
        given = {
            "config": config, "prompts": tiny.prompts(), "max_tokens": 12, "cores": cores, "capabilities": capabilities}
        done = subprocess.run(
            [sys.executable, "-c", SERVE + code], input=json.dumps(given), capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), **environment})
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
        for prompt, output in zip(tiny.prompts(), told["outputs"], strict=True):
            book.compare(tiny.reference, prompt, output)
        return told

    return start


def settings(tiny: Any, **changes: Any) -> dict[str, Any]:
    """With the attention and as many threads as they are by default."""
    return {**tiny.config("chunked", "prefix", {"use": "none"}, 2), "execution": {"depth": 2}, **changes}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that family")
def test_a_processor_without_avx512_and_bfloat16_gets_float32_and_kernels_of_its_own(
    serve: Any, tiny: Any, tmp_path: Any,
) -> None:
    """One of 2003: no AVX, no FMA, and nothing for 16-bit numbers."""
    model = tmp_path / "model"
    shutil.copytree(tiny.path, model)
    stated = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**stated, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    told = serve(
        settings(tiny, model={"path": str(model)}, dtype="auto"), OLD_KERNELS, capabilities=[],
        NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path / "kernels"),
        ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", OMP_NUM_THREADS="2")
    [why] = [note for note in told["notes"] if "bfloat16" in note]
    assert why == "dtype: float32 (auto: the checkpoint is bfloat16, but the device has no bfloat16 instructions)"
    assert len([note for note in told["notes"] if note.startswith("attention: auto chose 'cpu', because")]) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be kept on one core here")
def test_one_core_and_no_compiler_serve(serve: Any, tiny: Any, tmp_path: Any) -> None:
    told = serve(settings(tiny), cores=1, PATH=str(tmp_path), CC="", CXX="")
    assert told["threads"] == 1


def test_where_nothing_can_be_kept_kernels_are_compiled_at_the_start_and_the_log_says_why_once(
    run: Any, book: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    from hotswap.plugins.cpu import attention_kernels, operator_kernels

    def refuse(self: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    attention_kernels.attend_float32.compile()  # which takes longest, and need not do so each time
    monkeypatch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", refuse)
    for kernel in (attention_kernels.plan, operator_kernels.operate_float32):
        for name, value in {"_compiled": None, "_alone": None, "_address": 0}.items():
            monkeypatch.setattr(kernel, name, value)
    team._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "hotswap"):
        engine = run(settings(tiny, attention="cpu"))
    team._warn_once.cache_clear()
    [message] = [message for message in caplog.messages if "compiled anew at each start" in message]
    assert "no folder can be written to" in message and "NUMBA_CACHE_DIR" in message
    for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), 12), strict=True):
        book.compare(tiny.reference, prompt, output)
