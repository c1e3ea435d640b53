"""What may stand in a config, and how a mistake is explained."""

import json

import pytest

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.config.units import parse_bytes
from hotswap.core.errors import ConfigError
from hotswap.core.registry import Registry


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": "m", **values}, environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "wrong", "meant"),
    [
        ({"max_num_seq": 4}, "max_num_seq", "scheduler.max_running"),  # another engine's name
        ({"max_running": 4}, "max_running", "scheduler.max_running"),  # nested one level off
        ({"max-num-seqs": 1}, "max-num-seqs", "scheduler.max_running"),  # hyphens
        ({"server": {"hosst": "x"}}, "server.hosst", "server.host"),
        ({"server": {"max_model_len": 1}}, "server.max_model_len", "max_model_len"),
        ({"schduler": {}}, "schduler", "scheduler"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(values, wrong, meant):
    message = refusal(**values)
    assert message.startswith(f"{wrong}: unknown key. Did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("values", "path", "expected", "given"),
    [
        ({"server": {"port": "8000"}}, "server.port", "integer", "'8000'"),
        ({"server": {"port": 70000}}, "server.port", "65535", "70000"),
        ({"seed": True}, "seed", "integer", "True"),
        ({"dtype": "fp32"}, "dtype", "'float32'", "'fp32'"),
        ({"device": "CUDA"}, "device", "'cuda:1'", "'CUDA'"),
        ({"device": "cuda:x"}, "device", "'auto', 'cpu', 'cuda', or", "'cuda:x'"),
        ({"execution": {"num_threads": 100000}}, "execution.num_threads", "less than or equal to 1024", "100000"),
        ({"scheduler": {"max_batch_tokens": 0}}, "scheduler.max_batch_tokens", "greater than or equal to 1", "0"),
        ({"scheduler": {"max_batch_tokens": "512"}}, "scheduler.max_batch_tokens", "integer", "'512'"),
        ({"execution": {"depth": 0}}, "execution.depth", "greater than or equal to 1", "0"),
        ({"scheduler": 3}, "scheduler", "a name", "3"),
        ({"observers": "metrics"}, "observers", "list", "'metrics'"),
        ({"parallel": [{"size": 2}]}, "parallel[0].use", "required", ""),
        ({"server": {"drain_timeout_s": float("inf")}}, "server.drain_timeout_s", "finite", "inf"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected_and_what_was_given(values, path, expected, given):
    message = refusal(**values)
    assert message.startswith(f"{path}: ")
    assert expected in message and given in message


def test_all_problems_are_told_at_once():
    message = refusal(seed="x", server={"port": -1, "hosst": ""})
    assert "3 problems" in message
    assert all(path in message for path in ("seed", "server.port", "server.hosst"))


def test_a_wrong_value_hides_no_wrong_component():
    message = refusal(
        seed="x", scheduler={"use": "nope"}, kvcache={"use": "prefix", "evicton": "lru", "num_blocks": 0},
        observers=["metrics", "nothing"])
    assert "5 problems" in message
    for part in (
        "seed: should be a valid integer", "kvcache.num_blocks: should be greater", "no scheduler is called 'nope'",
        "kvcache.evicton: unknown key. Did you mean 'kvcache.eviction'?",
        "observers[1]: no observer is called 'nothing'",
    ):
        assert part in message


def test_a_key_beside_a_component_without_options_is_told_which_keys_are_valid():
    config = load_config({"model": "m", "speculator": {"use": "none", "xyz": 1}}, environ={}).config
    with pytest.raises(ConfigError, match=r"unknown key. Valid here: use\."):
        check_config(config, Registry())


def test_a_key_of_another_section_is_hinted_at_only_where_it_is_nearly_the_same():
    def told(section):
        config = load_config({"model": "m", "kvcache": {"use": "paged", **section}}, environ={}).config
        with pytest.raises(ConfigError) as caught:
            check_config(config, Registry())
        return str(caught.value)

    assert told({"eviction": "lru"}) == "kvcache.eviction: unknown key. Valid here: block_size, memory, num_blocks."
    assert "Did you mean 'scheduler.max_running'?" in told({"max_runing": 4})


def test_api_keys_say_both_of_their_forms_where_they_have_neither():
    for given in ("sk-one,sk-two", 7, None):
        message = refusal(server={"api_keys": given})
        assert message.startswith("server.api_keys: should be a list of keys ('[a, b]'), or a mapping")
        assert "sk-one" not in message


def test_a_model_needs_one_source():
    assert "either 'name' or 'path'" in refusal(model={"revision": "main"})
    assert "either 'name' or 'path'" in refusal(model={"name": "a", "path": "b"})
    with pytest.raises(ConfigError, match="model: is required"):
        load_config({}, environ={})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("250Mi", 250 * 2**20), ("250MiB", 250 * 2**20), ("250 MB", 250 * 10**6), ("1.5GiB", 3 * 2**29), ("512", 512)],
)
def test_sizes_have_units(text, num_bytes):
    assert parse_bytes(text) == num_bytes
    assert load_config({"model": "m", "kvcache": {"memory": text}}, environ={}).config.kvcache.memory == num_bytes


@pytest.mark.parametrize("text", ["250X", "250m", "MiB", "-1GiB", "1 GiB free", "1e3MB", "0GiB", "", "1,5GiB"])
def test_a_size_is_understood_as_a_whole_or_not_at_all(text):
    assert refusal(kvcache={"memory": text}).startswith("kvcache.memory: ")


def test_memory_and_number_of_blocks_exclude_each_other():
    assert "keep one" in refusal(kvcache={"memory": "1GiB", "num_blocks": 4})


def test_core_keys_are_split_from_the_component_s_own_options():
    values = {"use": "chunked", "max_running": 3, "policy": {"use": "fair"}}
    scheduler = load_config({"model": "m", "scheduler": values}, environ={}).config.scheduler
    assert scheduler.ref.model_dump() == {"use": "chunked", "policy": {"use": "fair"}}


def test_each_key_of_a_list_is_a_tenant_and_a_mapping_names_them():
    def tenants(keys):
        return load_config({"model": "m", "server": {"api_keys": keys}}, environ={}).config.server.api_keys

    assert tenants({"sk-one": "alice"}) == {"sk-one": "alice"}
    both = tenants(["sk-one", "sk-two"])
    assert set(both) == {"sk-one", "sk-two"}
    assert len(set(both.values())) == 2
    assert "sk-one" not in str(both.values())


def test_secrets_appear_neither_in_the_effective_config_nor_in_sources_nor_in_errors():
    values = {
        "model": "m", "server": {"api_keys": {"sk-secret": "alice"}},
        "observers": [{"use": "export", "token": "sk-secret"}],
    }
    resolved = load_config(values, environ={})
    shown = json.dumps([resolved.effective(), dict(resolved.sources)])
    assert "sk-secret" not in shown
    assert "2048" in shown  # max_batch_tokens is no secret
    for keys in ({"sk-secret": 3}, [7, "sk-secret"], "sk-secret", {"": "sk-secret"}):
        assert "sk-secret" not in refusal(server={"api_keys": keys})


def test_the_effective_config_is_json():
    effective = load_config({"model": "m", "scheduler": "static"}, environ={}).effective()
    assert json.loads(json.dumps(effective)) == effective
    assert effective["scheduler"]["use"] == "static"


def test_a_wildcard_origin_is_refused():
    assert "every website" in refusal(server={"cors_origins": ["*"]})


def test_a_bare_off_is_off_although_yaml_takes_it_for_false(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: m\nexecution: {graphs: off}\n")
    assert load_config(path, environ={}).config.execution.graphs == "off"
