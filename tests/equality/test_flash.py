"""Whole engines over the FlashAttention packages' stand-in: the tokens are transformers', to what 16 bits can tell."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MAX_TOKENS = 16
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}
CLOSE = 0.1
"""Logits of the tiny model spread over some 20; in float16 they are about this far off at most."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``calls(capability)`` -> the functions of the stand-in that are called, on a device of that capability."""
    path = Path(__file__).parents[1] / "attention" / "stand_in_flash" / "install_flash.py"
    spec = importlib.util.spec_from_file_location("install_flash", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    versions = {"flash-attn": "2.8.3", "flash_attn_3": "3.0.0b1"}
    yield lambda capability: module.install(monkeypatch, capability, versions)
    module.forget()


@pytest.mark.parametrize(("capability", "kv", "page", "speculator"), [
    ((8, 0), "paged", 256, NGRAM), ((9, 0), "prefix", 4, "none"), ((9, 0), "prefix", 4, NGRAM),
], ids=["2", "3", "3-ngram"])
def test_engines_on_flash_give_the_tokens_of_transformers(
    run: Any, tiny: Any, calls: Any, capability: tuple[int, int], kv: str, page: int, speculator: Any,
) -> None:
    called = calls(capability)
    settings = tiny.config({"use": "chunked", "max_chunk": 16}, kv, speculator, 2, attention="flash")
    settings |= {"dtype": "float16"}
    settings["kvcache"] = {"use": kv, "num_blocks": 4 if page == 256 else 45}
    if page == 4:
        settings["kvcache"]["block_size"] = page
    engine = run(settings)
    assert {share.page_size for share in engine.built.engines[0].cache_plan.groups.values()} == {page}
    [note] = [note for note in engine.built.notes if note.startswith("attention: ")]
    assert f"FlashAttention-{2 if page == 256 else 3}" in note
    prompts, near, compared = tiny.prompts(), 0, 0
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
            for token, (best, ahead) in zip(output, tiny.reference(prompt, output), strict=True):
                assert token == best or ahead < CLOSE, f"{token} instead of {best}, which is {ahead:.3f} ahead"
                near, compared = near + (token != best), compared + 1
    assert near <= 0.02 * compared, f"{near} of {compared}"
    engine.assert_clean()
    seen = engine.seen
    assert seen["cut prompts"]
    assert bool(seen["preempted"]) is bool(seen["cached tokens"]) is (page == 4)
    assert bool(seen["accepted"] and seen["rejected"]) is (speculator != "none")
    assert set(called) == ({"varlen", "kvcache"} if page == 256 else {"hopper"})
