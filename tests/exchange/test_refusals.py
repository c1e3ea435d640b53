"""What cannot be exchanged is refused with the reason and the config key, before anything is touched."""

import pytest

from hotswap.core.config import load_config
from hotswap.core.config.changes import changed, differences
from hotswap.core.config.check import check_config
from hotswap.core.errors import ConfigError
from hotswap.core.registry import INTERFACES, Registry

CONFIG = {
    "model": {"path": "nowhere"}, "scheduler": {"use": "chunked", "policy": "fcfs"}, "kvcache": "prefix",
    "server": {"admin_key": "secret-of-the-admin", "api_keys": ["a-client"]},
}


@pytest.fixture(scope="module")
def resolved():
    return load_config(CONFIG, environ={})


def exchanged(resolved, *sets):
    registry = Registry()
    old, new = (check_config(config, registry) for config in (resolved.config, changed(resolved, sets).config))
    return [(found.path, found.old, found.new) for found in differences(old, new)]


def test_a_part_and_a_part_of_it_are_told_apart(resolved):
    assert exchanged(resolved, "scheduler=continuous") == [
        ("scheduler", "scheduler:chunked", "scheduler:continuous")]
    assert exchanged(resolved, "scheduler.policy=fair_share") == [
        ("scheduler.policy", "queue_policy:fcfs", "queue_policy:fair_share")]
    assert exchanged(resolved, "kvcache.eviction=lfu", "speculator=ngram") == [
        ("kvcache.eviction", "eviction_policy:lru", "eviction_policy:lfu"),
        ("speculator", "speculator:none", "speculator:ngram")]
    assert exchanged(resolved, "scheduler.max_chunk=32") == [("scheduler", "scheduler:chunked", "scheduler:chunked")]


def test_a_mapping_changes_nothing_that_it_does_not_name():
    limited = load_config({**CONFIG, "scheduler": {"use": "chunked", "max_running": 32}}, environ={})
    new = changed(limited, ["scheduler={use: chunked, max_chunk: 4}"]).config.scheduler
    assert (new.max_running, new.ref.options) == (32, {"max_chunk": 4})


def test_what_serves_already_is_no_difference(resolved):
    assert exchanged(resolved, "scheduler=chunked", "attention=auto", "kvcache.eviction=lru") == []


def test_values_remember_that_an_exchange_has_set_them(resolved):
    new = changed(resolved, ["scheduler.policy=fair_share"])
    assert new.source("scheduler.policy") == "exchange"
    assert new.source("scheduler.use") == new.source("model.path") == "argument"
    assert new.source("kvcache.memory") == "default"


@pytest.mark.parametrize(("key", "value", "reason"), [
    ("model", "other", "weights are never loaded anew"), ("dtype", "float16", "the weights are loaded in it"),
    ("device", "cuda", "the weights are loaded there"), ("max_model_len", "99", "requests were taken that need it"),
    ("scheduler.max_running", "7", "the workers' buffers"),
    ("scheduler.max_batch_tokens", "99", "the workers' buffers"),
    ("kv_transfer", "host", "where its pages are"), ("parallel", "[{use: data, replicas: 2}]", "which processes"),
    ("execution", "processes", "runs the workers"), ("execution.depth", "2", "runs the workers"),
    ("observers", "[bill]", "cannot be changed while serving"),
    ("server.port", "80", "cannot be changed while serving"),
    ("logits_processors", "[]", "cannot be changed while serving"), ("seed", "7", "cannot be changed while serving"),
])
def test_what_takes_a_restart_is_refused_with_the_reason(resolved, key, value, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        changed(resolved, [f"{key}={value}"])
    assert caught.value.path in (key, key.partition(".")[0])
    assert "What can be exchanged: scheduler, kvcache, attention, speculator." in str(caught.value)


@pytest.mark.parametrize(("given", "message"), [
    ("scheduler=nope", "no scheduler is called 'nope'"), ("scheduler.polcy=fcfs", "Did you mean 'scheduler.policy'"),
    ("kvcache.eviction=nope", "no eviction_policy is called"), ("scheduler", "should be KEY=VALUE"),
    ("speculator={use: ngram, max_draft: 5000}", "is too small for one token and its 5000 drafts"),
])
def test_what_no_config_check_would_let_through_is_refused(resolved, given, message):
    with pytest.raises(ConfigError, match=message):
        exchanged(resolved, given)


def test_no_refusal_shows_a_key_of_the_server(resolved):
    for given in ("server.admin_key=", "server.admin_key=a-client", "server.port=x"):
        with pytest.raises(ConfigError) as caught:
            changed(resolved, [given])
        assert "secret-of-the-admin" not in str(caught.value)
        assert "a-client" not in str(caught.value)
    assert resolved.effective()["server"]["admin_key"] == "<hidden>"


def test_every_kind_says_how_it_is_exchanged():
    manners = {interface.kind: interface.exchangeable.value for interface in INTERFACES}
    assert {kind for kind, manner in manners.items() if manner != "never"} == {
        "scheduler", "kvcache", "attention", "speculator"}
