"""What the server costs, arm by arm."""

import pytest

from hotswap.core.errors import ConfigError


def run(load, number, others=0.0, **figures):
    from benchmarks.cpu.figures import Run

    return Run("arm", "offline" if load == "offline16" else "http", load, number, figures, others)


def http(number, tokens_per_s, cpu, p99, others=0.0):
    return run("http", number, others, out_tok_s=tokens_per_s, cpu_us_tok=cpu, client_us_tok=20.0, itl_p50_ms=10.0,
               itl_p99_ms=p99)


def test_a_server_is_charged_with_what_its_engine_does_not_use_in_the_same_round():
    from benchmarks.cpu.server import summary, told

    found = summary([
        run("offline16", 1, out_tok_s=100.0, cpu_us_tok=500.0), http(1, 90.0, 540.0, 25.0),
        run("idle", 1, idle_percent=1.0),
        run("offline16", 2, out_tok_s=50.0, cpu_us_tok=900.0), http(2, 40.0, 960.0, 35.0),
        run("offline16", 3, out_tok_s=50.0, cpu_us_tok=10.0), http(3, 5.0, 999.0, 99.0, others=1.0)])
    row = found["arm"]
    assert row["of offline"][:3] == pytest.approx((0.85, 0.8, 0.9)) and row["server, µs/token"] == (50, 40, 60, 2)
    assert row["p99/p50"] == (3.0, 2.5, 3.5, 2) and row["idle CPU, %"] == (1, 1, 1, 1)
    assert told(found).splitlines()[2].startswith("| arm | 0.85 (0.80–0.90) | 50.0 (40.0–60.0) | 20.0 (20.0–20.0) |")


def test_where_most_tokens_came_with_others_there_is_no_ratio_of_gaps():
    from benchmarks.cpu.server import summary

    burst = run("http", 1, out_tok_s=1.0, cpu_us_tok=1.0, client_us_tok=1.0, itl_p50_ms=0.0, itl_p99_ms=5.0)
    assert summary([burst])["arm"]["p99/p50"] is None
    assert summary([burst, http(2, 1.0, 1.0, 25.0)])["arm"]["p99/p50"].median == 2.5


def test_an_arm_is_a_name_and_the_keys_that_it_changes(fake, tmp_path):
    from benchmarks.cpu.server import TINY, arms_of

    ours, config = fake("hotswap", dtype="float32"), tmp_path / "config.yaml"
    two, plain = arms_of(ours, ["two:execution.use=processes,execution.depth=2", "plain:"], config, tmp_path)
    assert two.setup.options == {
        "dtype": "float32", "model": str(tmp_path), **TINY, "execution.use": "processes", "execution.depth": 2}
    assert plain.setup.model == str(config) and "execution.use" not in plain.setup.options
    assert [arm.name for arm in arms_of(ours, [], config, None)] == ["hotswap"]
    for wrong in (["execution.depth=1"], [":execution.depth=1"], ["a:", "a:"], ["a:execution.depth"]):
        with pytest.raises(ConfigError, match="--arm"):
            arms_of(ours, wrong, config, None)


def test_the_tiny_model_has_a_text_for_every_token_of_the_loads(tmp_path):
    from benchmarks.cpu.server import write_tiny
    from benchmarks.workloads import FIRST_ID, LAST_ID
    from hotswap.core.modeling.tokenizer import from_directory

    tokenizer = from_directory(write_tiny(tmp_path), {})
    assert tokenizer.vocab_size > LAST_ID
    texts = {tokenizer.decode([id]) for id in (FIRST_ID, LAST_ID)}
    assert len(texts) == 2 and all(len(text) == 4 and text.isalpha() for text in texts)
