"""Which engines can be run is found out before any is started, with the reason where one cannot."""

import sys

import pytest

from hotswap.core.errors import ConfigError


@pytest.fixture
def peers_of(tmp_path):
    from benchmarks.cpu.peers import read_peers

    (tmp_path / "weights").mkdir()

    def read(text, **given):
        file = tmp_path / "peers.yaml"
        file.write_text(text)
        return read_peers(file, home=str(tmp_path), **given)

    return read


ENGINES = """
home: ~/nowhere
engines:
  openvino-a: {adapter: openvino, python: gone/bin/python, model: weights}
  ours: {adapter: hotswap, model: weights, options: {attention.use: torch}}
  no-model: {adapter: hotswap, model: elsewhere}
"""


def test_what_is_not_installed_is_left_out_and_told(peers_of, tmp_path):
    peers = peers_of(ENGINES)
    assert [engine.name for engine in peers.chosen(None)] == ["ours"]
    assert peers.missing == {"openvino-a": f"there is no {tmp_path}/gone/bin/python",
                             "no-model": f"there is no {tmp_path}/elsewhere"}


def test_an_engine_without_its_distribution_is_not_installed(peers_of):
    peers = peers_of(ENGINES, pythons={"openvino": sys.executable})
    assert "has no distribution openvino-genai" in peers.missing["openvino-a"]


def test_what_is_asked_for_by_name_must_be_there(peers_of):
    with pytest.raises(ConfigError, match="openvino-a cannot be run: there is no"):
        peers_of(ENGINES).chosen(["ours", "openvino-a"])
    with pytest.raises(ConfigError, match="there is no engine 'our'; did you mean 'ours'"):
        peers_of(ENGINES).chosen(["our"])


def test_ours_is_that_of_this_tree_with_the_config_keys_that_were_set(peers_of):
    from benchmarks.cpu.peers import ROOT

    ours, = peers_of(ENGINES, sets={"execution.depth": 1}).chosen(["ours"])
    assert ours.env["PYTHONPATH"] == str(ROOT / "src") and ours.versions.keys() >= {"hotswap", "torch"}
    assert ours.setup.options == {"attention.use": "torch", "execution.depth": 1}
    assert ours.face("single") == "offline" and ours.face("http") == "http"


def test_threads_of_one_core_count_once(tmp_path, monkeypatch):
    from benchmarks.cpu.peers import cores

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_cpus_list").write_text(siblings)
    assert cores(tmp_path) == [0, 1]
    assert cores(tmp_path / "nowhere") == [0, 1, 2, 3]


def test_a_peer_finds_none_of_our_modules(monkeypatch):
    from benchmarks.cpu.peers import environment

    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("HOTSWAP_DTYPE", "float32")
    assert not environment().keys() & {"PYTHONPATH", "HOTSWAP_DTYPE"}


@pytest.mark.parametrize(("text", "words"), [
    ("home: x\nengines: {a: {adapter: vlm, model: weights}}", r"engines.a.adapter: .*did you mean 'vllm'"),
    ("home: x\nengines: {a: {adapter: vllm, modl: weights}}", r"engines\.a\.modl"),
    ("engines: {}", "home"),
])
def test_a_file_that_cannot_be_meant_is_refused(peers_of, text, words):
    with pytest.raises(ConfigError, match=words):
        peers_of(text)


def test_an_interpreter_for_nobody_is_refused(peers_of):
    with pytest.raises(ConfigError, match=r"--peer: there is no engine 'vlm'"):
        peers_of("home: x\nengines: {a: {adapter: vllm, model: weights}}", pythons={"vlm": "python"})


def test_the_file_that_is_shipped_names_adapters_that_there_are():
    from benchmarks.cpu.peers import HERE, _validated, faces_of

    for section in _validated(HERE / "peers.yaml").engines.values():
        assert faces_of(f"benchmarks.cpu.adapters.{section.adapter}")


@pytest.mark.parametrize(("arguments", "words"), [
    (["--loads", "singel"], "--loads: there is no load 'singel'"),
    (["--engines", "hotswp"], "--engines: there is no engine 'hotswp'; did you mean 'hotswap'?"),
    (["--out", "/nowhere/x.json", "--engines", "hotswap"], "--out: /nowhere/x.json cannot be written"),
    (["compare", "main", "main"], "compare: both are 'main'"),
    (["profile", "--rows", "1,x"], "--rows: '1,x' should be numbers"),
    (["weights", "--model", "nothing.gguf"], "--model: there is no file 'nothing.gguf'"),
])
def test_bad_arguments_end_with_2_before_anything_is_started(monkeypatch, capsys, arguments, words):
    from benchmarks.cpu.commands import main

    monkeypatch.setattr(sys, "argv", ["benchmarks/cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
