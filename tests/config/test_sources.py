"""Where config values come from, and which one wins."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.config import ResolvedConfig, load_config, sources
from hotswap.core.config.schema import known_keys
from hotswap.core.errors import ConfigError


def load(values: object, *sets: str, **environ: str) -> ResolvedConfig:
    return load_config(values, sets, environ)


@pytest.fixture
def file(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_model_is_all_that_must_be_given():
    config = load({"model": "smollm2-135m-instruct"}).config
    assert config.model.source == "smollm2-135m-instruct"
    assert (config.scheduler.use, config.kvcache.use) == ("chunked", "prefix")
    assert (config.attention.use, config.speculator.use, config.execution.use) == ("auto", "none", "auto")
    assert [ref.use for ref in config.observers] == ["metrics"]
    assert config.server.host == "127.0.0.1"


def test_flags_beat_the_environment_which_beats_the_file_which_beats_defaults(file):
    path = file("model: m\nserver: {port: 9001}\n")
    environ = {"HOTSWAP_SERVER__PORT": "9002"}
    flags = ["server.port=9003"]

    def port(source, sets=(), environ=None):
        resolved = load_config(source, sets, environ or {})
        return resolved.config.server.port, resolved.source("server.port")

    assert port(path, flags, environ) == (9003, "flag")
    assert port(path, (), environ) == (9002, "environment HOTSWAP_SERVER__PORT")
    assert port(path) == (9001, f"file {path}")
    assert port(file("model: m\n")) == (8000, "default")


def test_a_key_that_a_flag_does_not_name_keeps_its_value_from_the_file():
    resolved = load({"model": "m", "scheduler": {"use": "static", "max_running": 4}}, "scheduler.max_batch_tokens=64")
    scheduler = resolved.config.scheduler
    assert (scheduler.use, scheduler.max_running, scheduler.max_batch_tokens) == ("static", 4, 64)
    assert resolved.source("scheduler.max_running") == "argument"
    assert resolved.source("scheduler.max_batch_tokens") == "flag"


@pytest.mark.parametrize("flag", ["scheduler=continuous", "scheduler.use=continuous"])
@pytest.mark.parametrize("given", ["static", {"use": "static"}, {}])
def test_a_flag_exchanges_a_component_given_by_name_or_by_table(flag, given):
    assert load({"model": "m", "scheduler": given}, flag).config.scheduler.use == "continuous"


def test_a_bare_name_in_a_flag_keeps_the_other_keys_of_its_section():
    scheduler = load({"model": "m", "scheduler": {"max_running": 4}}, "scheduler=static").config.scheduler
    assert (scheduler.use, scheduler.max_running) == ("static", 4)


@pytest.mark.parametrize("told", [
    {"sets": ["scheduler={use: chunked, max_chunk: 4}"]},
    {"environ": {"HOTSWAP_SCHEDULER": "{use: chunked, max_chunk: 4}"}}])
def test_a_mapping_is_merged_with_the_section_of_the_file_key_by_key(told):
    file = {"use": "chunked", "max_running": 32, "policy": {"use": "priority", "aging_s": 9.0}}
    resolved = load_config({"model": "m", "scheduler": file}, **{"environ": {}, **told})
    assert resolved.config.scheduler.model_dump(exclude_unset=True) == {**file, "max_chunk": 4}
    assert resolved.source("scheduler.max_running") == "argument"
    assert resolved.source("scheduler.max_chunk").startswith(("flag", "environment"))


def test_of_a_mapping_that_names_another_component_the_former_one_s_options_go():
    file = {"use": "chunked", "max_running": 32, "max_chunk": 4}
    resolved = load({"model": "m", "scheduler": file}, "scheduler={use: static, policy: fcfs}")
    assert resolved.config.scheduler.model_dump(exclude_unset=True) == {
        "use": "static", "max_running": 32, "policy": "fcfs"}
    assert "'static' has no such option" in resolved.warnings[0]


def test_a_mapping_of_a_flag_takes_the_place_of_what_it_excludes_but_may_not_hold_both():
    file = {"model": {"name": "a", "revision": "main"}, "kvcache": {"memory": "1GiB"}}
    config = load(file, "kvcache={num_blocks: 8}", "model={revision: v2, path: /m}").config
    assert (config.kvcache.memory, config.kvcache.num_blocks) == (None, 8)
    assert (config.model.source, config.model.revision) == ("/m", "v2")
    with pytest.raises(ConfigError, match="both give the size"):
        load(file, "kvcache={num_blocks: 8, memory: 1GiB}")


def test_a_mapping_that_holds_secrets_is_replaced_as_a_whole():
    resolved = load({"model": "m", "server": {"api_keys": {"a": "anna"}}}, "server.api_keys={k: kim}")
    assert resolved.config.server.api_keys == {"k": "kim"}
    assert load({"model": "m", "server": {"port": 1}}, "server={host: h}").config.server.port == 1


def test_a_flag_reaches_into_a_component_that_the_file_names_barely():
    config = load({"model": "m", "scheduler": {"policy": "fair"}}, "scheduler.policy.weight=3").config
    assert config.scheduler.ref.options == {"policy": {"use": "fair", "weight": 3}}


def test_a_list_is_replaced_as_a_whole():
    resolved = load({"model": "m", "observers": ["metrics", "bill"]}, "observers=[{use: decision_log, path: log}]")
    assert [ref.model_dump() for ref in resolved.config.observers] == [{"use": "decision_log", "path": "log"}]
    assert resolved.source("observers[0].path") == "flag"


def test_another_model_takes_the_place_of_all_that_was_said_about_the_first():
    model = {"name": "m", "revision": "main"}
    assert load({"model": model}, "model=other").config.model.revision is None
    assert load({"model": model}, "model.path=/m").config.model.source == "/m"


def test_a_number_of_blocks_from_a_flag_takes_the_place_of_the_memory_from_the_file():
    kvcache = load({"model": "m", "kvcache": {"memory": "1GiB"}}, "kvcache.num_blocks=8").config.kvcache
    assert (kvcache.memory, kvcache.num_blocks) == (None, 8)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("12", 12), ("[1, 2]", [1, 2]), ("null", None), ("true", True), ("'7'", "7")])
def test_values_from_the_environment_and_flags_are_yaml(text, value):
    assert load({"model": "m"}, f"speculator.x={text}").config.speculator.ref.options == {"x": value}
    assert load({"model": "m"}, HOTSWAP_SPECULATOR__X=text).config.speculator.ref.options == {"x": value}


def test_an_unknown_variable_of_ours_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"servr.*'server'.*HOTSWAP_SERVR__PORT"):
        load({"model": "m"}, HOTSWAP_SERVR__PORT="1")


def test_variables_of_others_do_not_matter():
    assert load({"model": "m"}, HOTSWAPPER="1", HOME="/").config.server.port == 8000


@pytest.mark.parametrize("flag", ["scheduler.use", "=3", "seed.x=1", "observers.x=1", "seed={"])
def test_a_flag_that_cannot_be_meant_is_an_error(flag):
    with pytest.raises(ConfigError):
        load({"model": "m", "seed": 3, "observers": []}, flag)


def test_toml_and_yaml_say_the_same(file):
    yaml = file("model: m\nscheduler: {use: static, max_running: 2}\nobservers: [{use: bill}]\n")
    toml = file('model = "m"\nobservers = [{use = "bill"}]\n[scheduler]\nuse = "static"\nmax_running = 2\n', "c.toml")
    assert load(yaml).config == load(toml).config


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("model: a\nmodel: b\n", "c.yaml", "a key is given twice, line 2, column 1"),
        ("server: {port: 1, port: 2}\n", "c.yaml", "a key is given twice, line 1, column 19"),
        ("model: [\n", "c.yaml", "line 2"),
        ("- model\n", "c.yaml", "keys and values"),
        ("", "c.yaml", "is empty; at least a model"),
        ("# nothing yet\n", "c.yaml", "is empty"),
        ("model: !!python/object/apply:os.getcwd []\n", "c.yaml", "could not determine a constructor"),
        ("model = \n", "c.toml", "line 1"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(file, text, name, reason):
    with pytest.raises(ConfigError, match=reason):
        load(file(text, name))


@pytest.mark.parametrize(
    "text",
    [
        "[SEKRET", "{SEKRET: 4", "*SEKRET", "!SEKRET x", "'SEKRET", "SEKRET: a: b", "{SEKRET: 1, SEKRET: 2}", "@SEKRET",
        "%SEKRET", "&SEKRET a: &SEKRET b", "'a' 'SEKRET'", "!<SEKRET> x", "!!timestamp SEKRET", "!!bool SEKRET",
        "!!int SEKRET", "!!SEKRET x", "=SEKRET", "SEKRET: [\x00", "- SEKRET\n- [", "SEKRET", "- SEKRET",
    ],
)
def test_what_cannot_be_parsed_is_never_shown(file, text):
    for attempt in (
        lambda: load(file(text)), lambda: load(file(text, "c.toml")),
        lambda: load({"model": "m"}, f"server.api_keys={text}"), lambda: load({"model": "m"}, text),
        lambda: load({"model": "m"}, HOTSWAP_SERVER__API_KEYS=text),
    ):
        try:
            resolved = attempt()
        except ConfigError as error:
            assert "SEKRET" not in str(error)
            assert error.__cause__ is None
            assert "unicode string" not in str(error)
        else:
            assert "SEKRET" not in str((resolved.effective(), resolved.sources))


def test_a_value_that_cannot_be_parsed_names_its_flag_or_variable_its_line_and_column():
    for sets, environ, where in (
        (["server.api_keys=[a"], {}, "--set server.api_keys"), ([], {"HOTSWAP_SEED": "[a"}, "HOTSWAP_SEED"),
    ):
        with pytest.raises(ConfigError) as caught:
            load({"model": "m"}, *sets, **environ)
        assert str(caught.value).startswith(f"{where}: the value is no YAML; quote it. (expected ',' or ']', but got")
        assert "line 1, column 3" in str(caught.value)


@pytest.mark.parametrize("sets", [["server.api_keys.SEKRET=[a"], ["server.api_keys=[a]", "server.api_keys.SEKRET=b"],
                                  ["server.api_keys.SEKRET=1"]])
def test_a_key_under_a_secret_section_is_not_shown_either(sets):
    with pytest.raises(ConfigError, match="server.api_keys") as caught:
        load({"model": "m"}, *sets)
    assert "SEKRET" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load({"model": "m"}, HOTSWAP_SERVER__API_KEYS__SEKRET="1")
    assert "SEKRET" not in str(caught.value)


def test_a_key_of_a_secret_section_has_the_source_that_gave_it():
    resolved = load({"model": "m", "server": {"api_keys": {"a": "anna"}}}, "server.api_keys.k=kim")
    assert resolved.config.server.api_keys == {"a": "anna", "k": "kim"}
    assert resolved.source("server.api_keys") == "flag"
    assert "server.api_keys.k" not in resolved.sources


def test_a_variable_with_one_underscore_too_few_is_told_the_name_that_is_meant():
    with pytest.raises(ConfigError, match="HOTSWAP_SERVER_PORT; two underscores are a dot: HOTSWAP_SERVER__PORT"):
        load({"model": "m"}, HOTSWAP_SERVER_PORT="1")
    with pytest.raises(ConfigError, match="HOTSWAP_SCHEDULER__USE"):
        load({"model": "m"}, HOTSWAP_SCHEDULER_USE="static")


def test_the_revision_of_the_file_s_model_is_not_asked_of_a_flag_s():
    model = {"name": "a/b", "revision": "main"}
    assert load({"model": model}, "model.name=c/d").config.model.revision is None
    assert load({"model": model}, "model.name=c/d", "model.revision=v2").config.model.revision == "v2"
    assert load({"model": "a/b"}, "model.revision=v2", "model.name=c/d").config.model.revision == "v2"


def test_a_missing_file_and_a_binary_one_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "binary.yaml")


def test_an_old_name_works_with_a_warning_that_names_the_new_one(monkeypatch):
    monkeypatch.setattr(sources, "RENAMED", {"scheduler.max_seqs": "scheduler.max_running"})
    for resolved in (
        load({"model": "m", "scheduler": {"max_seqs": 4}}),
        load({"model": "m"}, "scheduler.max_seqs=4"),
        load({"model": "m"}, HOTSWAP_SCHEDULER__MAX_SEQS="4"),
    ):
        assert resolved.config.scheduler.max_running == 4
        assert resolved.config.scheduler.ref.options == {}
        assert "'scheduler.max_running'" in resolved.warnings[0]


def test_an_old_and_a_new_name_in_one_source_are_an_error_in_two_the_later_one_wins(monkeypatch, file):
    monkeypatch.setattr(sources, "RENAMED", {"scheduler.max_seqs": "scheduler.max_running"})
    both = {"scheduler": {"max_seqs": 4, "max_running": 5}}
    for both_given in (
        lambda: load({"model": "m", **both}),
        lambda: load(file("model: m\nscheduler: {max_running: 5, max_seqs: 4}\n")),
        lambda: load({"model": "m"}, "scheduler.max_seqs=4", "scheduler.max_running=5"),
        lambda: load({"model": "m"}, "scheduler.max_running=5", "scheduler.max_seqs=4"),
        lambda: load({"model": "m"}, "scheduler={max_running: 5, max_seqs: 4}"),
        lambda: load({"model": "m"}, HOTSWAP_SCHEDULER__MAX_SEQS="4", HOTSWAP_SCHEDULER__MAX_RUNNING="5"),
    ):
        with pytest.raises(ConfigError, match=r"scheduler.max_seqs: is the old name of 'scheduler.max_running'"):
            both_given()
    for old, new in (("max_seqs", "max_running"), ("max_running", "max_seqs")):
        resolved = load({"model": "m", "scheduler": {old: 4}}, f"scheduler.{new}=5")
        assert resolved.config.scheduler.max_running == 5
        assert resolved.source("scheduler.max_running") == "flag"


def test_the_given_mapping_is_not_changed():
    given = {"model": "m", "scheduler": {"use": "static"}}
    load(given, "scheduler.use=continuous")
    assert given == {"model": "m", "scheduler": {"use": "static"}}


@pytest.mark.parametrize("text", [
    "model: &a {x: *a}", "model: &a [*a]", "{[a]: 1, [a]: 2}", "? {a: 1}\n: 2", "2024-13-45", "[" * 9999,
])
def test_values_that_no_config_can_hold_are_errors_too(file, text):
    with pytest.raises(ConfigError):
        load(file(text))
    with pytest.raises(ConfigError):
        load({"model": "m"}, f"scheduler={text}")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted({part for path in known_keys().values() for part in path.split(".")} | {"use"}))
CONFIGS = st.dictionaries(KEYS | st.text(max_size=8), st.dictionaries(KEYS, VALUES, max_size=3) | VALUES, max_size=4)


@settings(deadline=None)
@given(CONFIGS, st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=3), st.text(max_size=12)), max_size=2))
def test_any_values_make_a_config_or_one_config_error(values, flags):
    sets = [f"{'.'.join(path)}={text}" for path, text in flags]
    with contextlib.suppress(ConfigError):
        effective = load_config({"model": "m", **values}, sets, {}).effective()
        json.dumps(effective)


@settings(deadline=None)
@given(st.text())
def test_any_file_makes_a_config_or_one_config_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(ConfigError):
        load_config(path, (), {})
