"""What is served by an engine that the config built, and its defaults."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotswap.core.config import load_config
from hotswap.core.errors import ConfigError
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.server.frontend import Frontend, derived_seed
from hotswap.server.served import Served, defaults_of, loaded, served_by


def built(
    tokenizer: Tokenizer, stated: dict[str, object], replicas: tuple[int, ...] = (), **server: object,
) -> SimpleNamespace:
    checkpoint = SimpleNamespace(
        tokenizer=lambda: tokenizer, eos_token_ids=lambda size: frozenset({1}), revision="abc", chat_template="model's",
        generation_config=stated)
    return SimpleNamespace(
        resolved=load_config({"model": "owner/name", "dtype": "float32", "seed": 5, "server": server}, environ={}),
        engine=SimpleNamespace(engines=lambda: replicas), checkpoint=checkpoint,
        facts=SimpleNamespace(vocab_size=260), max_model_len=64, request_options={},
        listing=list, ranks=list, install_routes=lambda app: None, exchange=lambda sets, replica: [],
        effective=lambda: {"seed": 5}, deviations=dict,
        notes=["a note"], warnings=[], honoured=frozenset())


def test_loading_is_logged_with_its_time_and_what_was_built_is_stopped(engine, monkeypatch, caplog):
    found, stopped = built(engine.tokenizer, {}), []
    found.engine, found.warnings = SimpleNamespace(stop=lambda: stopped.append(True)), ["a warning"]
    monkeypatch.setattr("hotswap.core.engine.build.build_engine", lambda resolved, progress: found)
    with caplog.at_level("INFO"), loaded(found.resolved, progress=False):
        assert not stopped
    assert stopped
    first, *others = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"loaded owner/name in \d+\.\d s", first)
    assert others == ["a warning", "a note"]


def test_the_models_sampling_defaults_hold_unless_switched_off(engine):
    stated = {"temperature": 0.2, "top_k": None, "pad_token_id": 3}
    on = Frontend(served_by(built(engine.tokenizer, stated)))
    off = Frontend(served_by(built(engine.tokenizer, stated, generation_config=False)))
    assert (on.sampling({}).temperature, off.sampling({}).temperature) == (0.2, 1.0)
    assert on.sampling({"temperature": 0.9}).temperature == 0.9


def test_a_model_that_does_not_sample_is_greedy_by_default():
    assert defaults_of({"do_sample": False, "top_p": 0.9}) == {"temperature": 0.0, "top_p": 0.9}


def test_names_keys_and_components_come_from_the_config(engine):
    served = served_by(built(engine.tokenizer, {}))
    assert (served.name, served.vocab_size, served.max_model_len, served.seed) == ("owner/name", 260, 64, 5)
    assert (served.cache_key.model_revision, served.cache_key.dtype) == ("abc", "float32")
    assert served.describe()["notes"] == ["a note"]
    assert served_by(built(engine.tokenizer, {}, served_model_name="mine")).name == "mine"


def test_what_can_run_and_wait_is_each_replica_s(engine):
    one, three = (served_by(built(engine.tokenizer, {}, replicas=each, max_queue=44)) for each in ((), (1, 2, 3)))
    assert (one.capacity, three.capacity) == (300, 900)


def test_a_template_file_replaces_the_models(engine, tmp_path):
    assert served_by(built(engine.tokenizer, {})).chat_template == "model's"
    file = tmp_path / "chat.jinja"
    file.write_text("mine")
    assert served_by(built(engine.tokenizer, {}, chat_template=str(file))).chat_template == "mine"
    with pytest.raises(ConfigError, match=r"server\.chat_template.*cannot be read"):
        served_by(built(engine.tokenizer, {}, chat_template=str(tmp_path / "nothing")))


def test_a_broken_template_stops_the_start(engine):
    with pytest.raises(ConfigError, match="chat template cannot be compiled"):
        Frontend(Served("tiny", None, engine.tokenizer, 260, 64, chat_template="{% for %}"))  # type: ignore[arg-type]


def test_bad_words_are_banned_at_the_beginning_and_behind_a_space(engine):
    frontend = Frontend(Served("tiny", engine, engine.tokenizer, 260, 64))
    sampling = frontend.sampling({"bad_words": ["no"], "max_tokens": 1})
    (request,) = frontend.requests("x", [_prompt(engine, "a")], sampling)
    assert set(request.bad_words_token_ids) == {tuple(engine.tokenizer.encode(word)) for word in ("no", " no")}


def test_the_choices_of_each_prompt_share_what_the_first_one_computes(engine):
    frontend = Frontend(Served("tiny", engine, engine.tokenizer, 260, 64))
    sampling = frontend.sampling({"n": 3, "max_tokens": 1})
    requests = frontend.requests("x", [_prompt(engine, "a"), _prompt(engine, "b")], sampling)
    assert [(request.id, request.fork_of) for request in requests] == [
        ("x-0", None), ("x-1", "x-0"), ("x-2", "x-0"), ("x-3", None), ("x-4", "x-3"), ("x-5", "x-3")]


def _prompt(engine, text):
    from hotswap.server.frontend import Prompt

    return Prompt(engine.tokenizer.encode(text), text)


def test_seeds_of_choices_are_spread_and_fixed():
    seeds = {derived_seed(seed, choice) for seed in range(50) for choice in range(20)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(7, 0) == derived_seed(7, 0)


def test_nothing_in_the_package_unpickles():
    root = Path(__file__).parents[2]
    for folder in ("core", "plugins", "server"):
        for file in (root / folder).rglob("*.py"):
            assert not re.search(
                r"^\s*(import|from) (pickle|dill|cloudpickle|marshal|shelve)\b|recv_pyobj|weights_only=False",
                file.read_text(), re.M), file
