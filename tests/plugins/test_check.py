"""What ``config check`` finds out before any memory is touched."""

import sys
from dataclasses import replace

import pytest

from hotswap.core.config import load_config
from hotswap.core.config.auto import choose_attention
from hotswap.core.config.check import check_config
from hotswap.core.config.components import Components
from hotswap.core.config.limits import AttentionNeeds
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry
from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.parallel.inline import InlineExecutor


@pytest.fixture
def check(parts):
    def run(**changes: object) -> Components:
        return check_config(load_config({**parts, **changes}, environ={}).config, Registry())

    return run


def refusal(check, **changes):
    with pytest.raises(ConfigError) as caught:
        check(**changes)
    return str(caught.value)


def test_every_named_component_is_built_and_found_under_its_config_path(check):
    components = check(parallel=["fake"])
    assert [path for path, _ in components.walk()] == [
        "scheduler", "scheduler.policy", "kvcache", "attention", "speculator", "quantization", "execution",
        "kv_transfer", "logits_processors[0]", "parallel[0]", "observers[0]",
    ]
    assert components.scheduler.label == "scheduler:fake"
    assert [part.kind for part in components.listed("parallel")] == ["shard"]
    assert components.notes == ()


def test_deployments_nest_and_lead_the_list(check):
    check(parallel=["copies", "copies", "fake"])
    assert "parallel[1]: deployment:copies runs several engines and cannot stand behind shard:fake" in refusal(
        check, parallel=["fake", "copies"])


def test_what_is_wrong_with_the_strategies_of_a_role_is_told_under_its_own_path(check):
    check(parallel=[{"use": "roles", "left": ["fake"]}])
    for left, message in (
        (["tensr"], "parallel[0].left[0]: no shard is called 'tensr'"),
        (["fake", "copies"], "parallel[0].left[1]: deployment:copies runs several engines"),
        (["fake", "fake"], "parallel[0].left[1]: 'fake' is listed twice"),
    ):
        assert message in refusal(check, parallel=[{"use": "roles", "left": left}, "fake"])


def test_an_unmet_requirement_of_a_part_names_both_sides_the_reason_and_the_key_to_change(check):
    message = refusal(check, scheduler={"use": "fake", "policy": "forking"})
    assert message == (
        "scheduler.policy: queue_policy:forking requires 'fork' of the kvcache: it starts children from their parents. "
        "kvcache:fake (kvcache) offers shrink. Change kvcache.use."
    )
    check(scheduler={"use": "fake", "policy": "forking"}, kvcache="forkable")


def test_what_a_stage_of_a_pipeline_cannot_give_a_speculator_is_refused_without_a_checkpoint(check):
    stages = [{"use": "pipeline", "size": 2}]
    for speculator in ({"use": "draft", "model": "small"}, {"use": "eagle", "model": "head"}):
        name = speculator["use"]
        message = refusal(check, speculator=speculator, parallel=stages, execution="auto")
        assert message.startswith("parallel[0]: shard:pipeline requires 'stages' of the speculator: ")
        assert message.endswith(
            f"speculator:{name} (speculator) offers nothing. Change speculator.use, or give one stage.")
        check(speculator=speculator, parallel=[{"use": "pipeline", "size": 1}], execution="auto")
    for speculator in ("none", "ngram"):
        check(speculator=speculator, parallel=stages, execution="auto")
    own = {"use": "disaggregated", "decode_parallel": stages}
    assert "parallel[0].decode_parallel[0]: shard:pipeline requires 'stages'" in refusal(
        check, speculator={"use": "draft", "model": "small"}, parallel=[own], kv_transfer="shm", execution="auto")


def test_layers_for_another_number_of_stages_are_refused_without_a_checkpoint(check):
    stages = {"use": "pipeline", "size": 2, "layers": [10, 10, 10]}
    assert refusal(check, parallel=[stages], speculator="none", execution="auto").startswith(
        "parallel[0].layers: [10, 10, 10] are 3 stages, but size is 2")
    check(parallel=[{**stages, "size": 3}], speculator="none", execution="auto")


def test_experts_without_ranks_to_lie_on_are_refused_without_a_checkpoint(check):
    copies, split, apart = {"use": "data", "replicas": 2}, {"use": "tensor", "size": 2}, {"use": "pipeline", "size": 2}
    for alone in (["expert"], [{**copies, "replicas": 1}, "expert"], ["expert", apart]):
        assert "shard:expert requires 'peers' of the shard or the deployment: it spreads experts over ranks" in refusal(
            check, parallel=alone, speculator="none", execution="auto")
    prefill = {"use": "disaggregated", "prefill_parallel": ["expert"]}
    for among in ([copies, "expert"], ["expert", split], [prefill]):
        check(parallel=among, speculator="none", execution="auto", kv_transfer="shm", kvcache="paged")


def test_experts_behind_the_ranks_that_they_spread_over_are_refused_with_the_order_that_works(check):
    copies, split, apart = {"use": "data", "replicas": 2}, {"use": "tensor", "size": 2}, {"use": "pipeline", "size": 2}
    for wrong, right in (
        ([split, "expert"], "[expert, tensor]"), ([copies, split, "expert"], "[data, expert, tensor]"),
        ([apart, split, "expert"], "[pipeline, expert, tensor]"),
        ([split, apart, "expert"], "[expert, tensor, pipeline]"),
    ):
        at = wrong.index("expert")
        assert refusal(check, parallel=wrong, speculator="none", execution="auto") == (
            f"parallel[{at}]: shard:expert spreads over the ranks that shard:tensor makes, and must stand before it: "
            f"parallel: {right}.")
        order = right.strip("[]").split(", ")
        in_order = sorted(wrong, key=lambda each: order.index(each if isinstance(each, str) else each["use"]))
        check(parallel=in_order, speculator="none", execution="auto")


def test_all_refusals_are_told_at_once(check):
    message = refusal(
        check, scheduler={"use": "fake", "policy": "forking", "max_runing": 3}, kvcache="fkae",
        speculator={"use": "fake", "max_draft": 3000}, logits_processors=["fake", "fake"], parallel=["tensr"],
    )
    for part in (
        "scheduler.max_runing: unknown key. Did you mean 'scheduler.max_running'?",
        "kvcache: no kvcache is called 'fkae'. Did you mean 'fake'?",
        "scheduler.max_batch_tokens: 2048 is too small for one token and its 3000 drafts",
        "logits_processors[1]: 'fake' is listed twice",
        "parallel[0]: no shard is called 'tensr'",
    ):
        assert part in message
    assert "problems" in message


@pytest.mark.parametrize("section", ["logits_processors", "observers", "parallel"])
def test_a_component_that_is_listed_twice_is_refused_however_it_is_spelt(check, section):
    assert f"{section}[1]: 'fake' is listed twice" in refusal(check, **{section: ["fake", "parts:fake"]})


def test_a_chat_template_that_is_not_there_is_missed_before_the_weights_are_loaded(check, tmp_path):
    message = refusal(check, server={"chat_template": "/nope.jinja"})
    assert message.startswith("server.chat_template: there is no file '/nope.jinja'")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    check(server={"chat_template": str(template)})


def test_several_wrong_options_of_one_component_are_told_side_by_side(check):
    message = refusal(check, speculator={"use": "fake", "max_draft": "x", "a": 1})
    assert message.startswith("2 problems:\n  speculator.max_draft: ")


def test_drafts_fit_into_the_context(check):
    assert "speculator: 3 drafts" in refusal(check, max_model_len=3)
    check(max_model_len=4)


def test_a_step_too_small_for_a_token_of_every_running_request_is_refused_where_prompts_need_several_steps(check):
    small = {"use": "fake", "max_batch_tokens": 16, "max_running": 17}
    assert refusal(check, scheduler=small).startswith("scheduler.max_batch_tokens: 16 is less than max_running 17")
    assert refusal(check, scheduler=small, max_model_len=17)
    assert "take turns" in check(scheduler=small, max_model_len=16).notes[0]


def test_a_transfer_between_engines_that_nobody_hands_requests_to_is_noted(check):
    for parallel in ([], ["copies"], ["fake"]):
        [note] = check(kv_transfer="carrier", parallel=parallel).notes
        assert note.startswith("kv_transfer: no deployment in parallel hands requests over, so that kv_transfer:")
    for parallel in (["handing"], ["copies", "handing"]):
        assert check(kv_transfer="carrier", parallel=parallel).notes == ()
    assert check(kv_transfer="host", kvcache="prefix").notes == ()


def test_auto_takes_the_attention_made_for_the_device_else_a_general_one_and_says_why(check, caplog):
    registry = Registry()

    def choose(device):
        ref, note = choose_attention(registry, ComponentRef(use="auto"), AttentionNeeds(device))
        return ref.use, note

    name, note = choose("chip:0")
    assert name == "chip"
    assert "made for chip, unless the model needs what it lacks: then 'torch' or '" in note
    with caplog.at_level("DEBUG"):
        name, note = choose("cpu")
    assert name == "cpu"
    assert "chip" not in note, "nobody can do anything about it"
    assert "chip does not take device cpu, but chip" in caplog.text


def test_auto_passes_over_attention_that_does_not_take_what_the_config_gives(check):
    pages = {"use": "fake", "block_size": 7}
    for changes, lack in (
        ({"dtype": "float32"}, "dtype float32, but bfloat16"), ({"kvcache": pages}, "kvcache.block_size 7, but 16, 32"),
    ):
        parts = check(attention="auto", device="chip", **changes)
        assert parts.attention.label != "attention:chip"
        assert f"chip does not take {lack}" in parts.notes[0]


def test_auto_says_which_option_keeps_it_from_the_attention_made_for_the_device(check):
    parts = check(attention={"use": "auto", "graphs": True}, device="cpu")
    assert parts.attention.label == "attention:torch"
    [note] = [note for note in parts.notes if note.startswith("attention: ")]
    assert "cpu, made for cpu, does not take attention.graphs: leave it out to have cpu" in note


@pytest.mark.parametrize(("attention", "device", "obstacle"), [
    ("torch", "cpu", "the device is cpu, and graphs need cuda or an attention backend that records steps itself"),
    ({"use": "torch", "graphs": False}, "cpu", "as attention:torch does not"),
    ("chip", "chip", "the device is chip, and graphs need cuda"),
])
def test_full_graphs_that_the_attention_makes_impossible_are_refused_before_anything_is_loaded(
    check, attention, device, obstacle,
):
    with pytest.raises(ConfigError, match=obstacle) as caught:
        check(attention=attention, device=device, dtype="bfloat16", execution={"graphs": "full"})
    assert caught.value.path == "execution.graphs"
    assert str(caught.value).endswith("choose 'auto' or 'off'")
    check(attention=attention, device=device, dtype="bfloat16", execution={"graphs": "auto"})
    check(attention="cpu", device="cpu", execution={"graphs": "full"})


@pytest.mark.parametrize(("dtype", "changes", "lack"), [
    ("float32", {}, "dtype float32, but bfloat16"), ("bfloat16", {"head_dim": 80}, "head size 80, but 64, 128"),
    ("bfloat16", {"window": 9}, "a sliding window of 9"), ("bfloat16", {"softcap": 30.0}, "a softcap of 30.0"),
])
def test_auto_passes_over_attention_that_lacks_what_the_model_needs(parts, dtype, changes, lack):
    config = load_config({**parts, "attention": "auto", "device": "chip"}, environ={}).config
    plain = GroupShape(4, 2, 64, 0, 0.125)
    shapes = {"as it is": (plain,), "as it lacks": (plain, replace(plain, **changes))}
    before = check_config(config, Registry())
    fits = check_config(config, Registry(), needs=AttentionNeeds("chip:0", "bfloat16", shapes=shapes["as it is"]))
    assert before.attention.label == fits.attention.label == "attention:chip"
    found = check_config(config, Registry(), needs=AttentionNeeds("chip:0", dtype, shapes=shapes["as it lacks"]))
    assert found.attention.label == "attention:torch"
    [note] = found.notes
    assert note.startswith("attention: auto chose 'torch', because it runs on any device, and none that is made for")
    assert f"chip does not take {lack};" in note
    assert "unless the model" not in note + fits.notes[0]


def test_auto_passes_over_a_stranger_s_part_that_raises_when_it_is_asked_and_says_what(check, install):
    install("driverless", {
        "hotswap.attention": {"aaa": "parts:WithoutDriver"}, "hotswap.executor": {"aaa": "parts:UnableExecutor"}})
    parts = check(attention="auto", execution="auto", device="cpu")
    assert (parts.attention.label, parts.executor.label) == ("attention:cpu", "executor:inline")
    package = "package driverless 1.0 (parts:WithoutDriver)"
    assert f"aaa: attention 'aaa' of {package} raised RuntimeError: no driver" in parts.notes[0]


@pytest.mark.parametrize(("section", "part", "method"), [
    ("attention", CPUAttention, "support"), ("execution", InlineExecutor, "describe"),
])
def test_auto_hides_no_mistake_of_a_part_of_ours(check, monkeypatch, section, part, method):
    def fail(self):
        raise TypeError("planted")

    monkeypatch.setattr(part, method, fail)
    with pytest.raises(TypeError, match="planted"):
        check(device="cpu", **{section: "auto"})


@pytest.mark.parametrize("name", ["aaa", "cpu"])
def test_a_package_does_not_become_everyone_s_attention_by_the_name_of_its_backend(check, install, name):
    install("stranger", {"hotswap.attention": {name: "parts:ForCPU"}})
    attention = check(attention="auto", device="cpu").attention
    assert (attention.name, attention.origin.distribution) == ("cpu", "hotswap")
    mine = check(attention=f"stranger:{name}", device="cpu").attention
    assert mine.origin.distribution == "stranger"


@pytest.mark.parametrize("name", ["aaa", "inline"])
def test_a_package_does_not_become_everyone_s_executor_by_the_name_of_its_own(check, install, name):
    install("stranger", {"hotswap.executor": {name: "parts:FakeExecutor"}})
    executor = check(execution="auto").executor
    assert (executor.name, executor.origin.distribution) == ("inline", "hotswap")


def test_of_backends_that_auto_can_never_choose_nothing_is_told(check):
    assert "composite" not in check(attention="auto", device="cpu").notes[0]


def test_auto_is_noted(check):
    assert check(attention="auto", device="chip").notes == check(attention="auto", device="chip:1").notes
    assert check(attention="auto", device="chip").attention.label == "attention:chip"


def test_what_the_attention_backend_does_not_take_is_refused_with_the_key_to_change(check):
    message = refusal(check, attention="chip", device="cpu", dtype="float16", kvcache={"use": "fake", "block_size": 7})
    for part in (
        "device: attention:chip does not take 'cpu', but chip",
        "dtype: attention:chip does not take 'float16', but bfloat16",
        "kvcache.block_size: attention:chip does not take 7, but 16, 32",
    ):
        assert part in message
    check(attention="chip", device="chip:1", dtype="bfloat16", kvcache={"use": "fake", "block_size": 32})
    check(attention="chip", device="chip", dtype="auto")


def test_options_of_another_component_of_the_kind_are_refused(check):
    for section, other in (
        ("kvcache", {"use": "paged", "eviction": "lru"}), ("scheduler", {"use": "continuous", "max_chunk": 8}),
    ):
        assert f"{section}.{[*other][1]}: unknown key" in refusal(check, **{section: other})


def test_a_model_component_that_the_config_names_is_checked_too(check):
    assert "model: no model is called 'nope'" in refusal(check, model={"name": "m", "use": "nope"})


def test_nothing_but_the_named_components_is_imported(check, install):
    install("bystander", {"hotswap.scheduler": {"other": "bystander:X"}}, "raise RuntimeError")
    check()
    assert "bystander" not in sys.modules
