"""The runner: whatever way a request's tokens are computed, it says what the model says of the whole sequence."""

import itertools

import pytest
import torch

from hotswap.core.interfaces.kvcache import Grant, GroupGrant
from hotswap.core.request import SamplingParams

CHUNKS = [1, 3, 7, 16, None]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_any_size_give_the_same_tokens(make_host, reference, prompts, page_size, chunk):
    host = make_host(page_size)
    host.new("e", prompts["e"])
    assert host.generate("e", 12, chunk) == reference.greedy(prompts["e"], 12)


@pytest.mark.parametrize("order", list(itertools.permutations("abcd"))[::5], ids="".join)
def test_rows_do_not_depend_on_their_place_or_their_neighbours(make_host, reference, prompts, order):
    host = make_host()
    for name in order:
        host.new(name, prompts[name])
        host.row(name, len(prompts[name]))
    host.step()
    for _ in range(9):
        for name in order:
            host.row(name)
        host.step()
    for name in order:
        assert host.tokens[name] == prompts[name] + reference.greedy(prompts[name], 10)


def test_prefill_chunks_and_decoding_share_a_step(make_host, reference, prompts):
    host = make_host()
    host.new("a", prompts["a"])
    host.prefill("a")
    host.new("e", prompts["e"])
    for _ in range(3):
        host.row("a")
        host.row("e", 10)
        rows = host.step()
        assert len(rows["a"].kept) == 1
        assert rows["e"].kept == []
    host.row("e", 7)
    host.step()
    assert host.tokens["a"][3:] == reference.greedy(prompts["a"], 4)
    assert host.tokens["e"][37:] == reference.greedy(prompts["e"], 1)


def test_only_rows_that_sample_reach_the_head(make_host, model, prompts):
    host = make_host()
    for name in ("a", "e"):
        host.new(name, prompts[name])
    host.row("a", 3)
    host.row("e", 20)
    host.step()
    assert model.head_rows == [1]


def test_chained_steps_need_no_token_from_the_host(make_host, reference, prompts):
    host = make_host()
    for name in ("a", "d"):
        host.new(name, prompts[name])
        host.row(name, len(prompts[name]))
    messages = [host.take()]
    for _ in range(5):
        for name in ("a", "d"):
            host.row(name)
        messages.append(host.take())
    for verdict in [host.worker.execute(message) for message in messages]:
        host.absorb(verdict)
    for name in ("a", "d"):
        assert host.tokens[name] == prompts[name] + reference.greedy(prompts[name], 6)


def test_true_lengths_are_reported_per_group(make_host, prompts):
    host = make_host()
    host.new("e", prompts["e"])
    host.row("e", 20)
    assert host.step()["e"].computed == 20
    host.row("e", 17)
    row = host.step()["e"]
    assert row.computed == 37
    assert len(row.kept) == 1


def test_a_suspended_request_comes_again_as_new_and_goes_on(make_host, reference, prompts):
    host = make_host()
    host.new("d", prompts["d"])
    host.generate("d", 5)
    host.suspend("d")
    host.new("a", prompts["a"])  # takes over the pages at once
    host.row("a", 3)
    host.step()
    assert host.verdicts[-1].suspended == [("d", {"full": 13, "window": 13}, False)]
    host.new("d", host.tokens["d"], prompt_length=9)
    host.generate("d", 6, chunk=4)
    assert host.tokens["d"] == prompts["d"] + reference.greedy(prompts["d"], 11)
    assert host.generate("a", 3) == reference.greedy(prompts["a"], 4)[1:]


def test_a_suspension_behind_a_step_in_flight_reports_the_true_length(make_host, prompts, script, reference):
    answer = reference.greedy(prompts["a"], 20)
    host = make_host(speculator=script(lambda request, tokens, slots: answer[len(tokens) - 3 :][:slots]))
    host.new("a", prompts["a"])
    host.row("a", 3, drafts=3)
    first = host.take()
    host.suspend("a")
    verdicts = [host.worker.execute(message) for message in (first, host.take())]
    assert verdicts[0].rows[0].accepted == 3
    assert verdicts[1].suspended[0].computed == {"full": 6, "window": 6}


def test_a_shared_prefix_is_not_computed_again(make_host, model, reference, prompts):
    host = make_host(page_size=4)
    host.new("e", prompts["e"])
    host.generate("e", 2)
    host.new("twin", prompts["e"])
    host.resume("twin", 36)
    for group, table in host.tables["e"].items():
        host.tables["twin"][group] = list(table[:9])
    shared = {group: GroupGrant(0, tuple(table)) for group, table in host.tables["twin"].items()}
    host.message.grants.append(("twin", Grant(shared)))
    seen = []
    model.before_forward = lambda ids: seen.append(len(ids))
    assert host.generate("twin", 5) == reference.greedy(prompts["e"], 5)
    assert seen[0] == 1


def test_a_partial_page_is_copied_before_rows_run(make_host, reference, prompts):
    host = make_host(page_size=16)
    host.new("e", prompts["e"])
    host.generate("e", 4)
    host.new("child", prompts["e"])
    host.resume("child", 36)
    copies = {}
    for group, table in host.tables["e"].items():
        copy = host.free[group].pop()
        host.tables["child"][group] = [*table[:2], copy]
        copies[group] = GroupGrant(0, (*table[:2], copy), copies=((table[2], copy),))
    host.message.grants.append(("child", Grant(copies)))
    assert host.generate("child", 6) == reference.greedy(prompts["e"], 6)
    assert host.generate("e", 3) == reference.greedy(prompts["e"], 7)[4:]


def test_pages_behind_the_window_can_be_given_to_others(make_host, reference, prompts):
    host = make_host(page_size=2)
    host.new("e", prompts["e"])
    host.prefill("e", chunk=8)
    table = host.tables["e"]["window"]
    first_live = (37 - 5) // 2
    host.message.grants.append(("e", Grant({"window": GroupGrant(len(table), (), first_live)})))
    host.free["window"] += table[:first_live]
    table[:first_live] = [0] * first_live
    host.new("d", prompts["d"])
    host.row("d", 9)
    host.row("e")
    host.step()
    assert host.generate("e", 6) == reference.greedy(prompts["e"], 8)[2:]
    assert host.generate("d", 3) == reference.greedy(prompts["d"], 4)[1:]


def test_sampled_tokens_depend_on_seed_and_position_alone(make_host, prompts):
    hot = SamplingParams(temperature=1.0, top_p=0.9)
    solo = make_host()
    solo.new("d", prompts["d"], hot, seed=7)
    expected = solo.generate("d", 10)
    crowd = make_host()
    crowd.new("e", prompts["e"], hot, seed=1)
    crowd.prefill("e")
    crowd.new("d", prompts["d"], hot, seed=7)
    crowd.row("d", 4)
    crowd.row("e")
    crowd.step()
    crowd.row("d", 5)
    crowd.step()
    for _ in range(9):
        crowd.row("e")
        crowd.row("d")
        crowd.step()
    assert crowd.tokens["d"][9:] == expected


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompt_logprobs_are_the_same_for_chunks_of_any_size(make_host, reference, prompts, chunk):
    host = make_host()
    host.new("e", prompts["e"], SamplingParams(temperature=0, prompt_logprobs=2))
    found = {}
    while not host.tokens["e"][37:]:
        host.row("e", min(chunk or 37, 37 - host.bound["e"]))
        row = host.step()["e"]
        for i, entry in enumerate(row.prompt_logprobs or ()):
            found[row.prompt_logprobs_from + i] = entry
    expected = reference.logits(prompts["e"]).log_softmax(-1)
    assert sorted(found) == list(range(1, 37))
    for position, entry in found.items():
        row = expected[position - 1]
        assert entry.token_id == prompts["e"][position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [pair[0] for pair in entry.top] == row.topk(2).indices.tolist()


def test_prompt_logprobs_end_with_the_prompt_when_output_is_recomputed(make_host, prompts):
    host = make_host()
    host.new("a", prompts["a"] + [5, 6], SamplingParams(temperature=0, prompt_logprobs=0), prompt_length=3)
    row = host.prefill("a")
    assert [entry.token_id for entry in row.prompt_logprobs] == prompts["a"][1:]
    assert row.prompt_logprobs_from == 1


def test_logprobs_in_a_mixed_batch_are_those_of_the_row_itself(make_host, reference, prompts):
    host = make_host()
    asks = SamplingParams(temperature=0, logprobs=3)
    for name, sampling in (("a", asks), ("e", SamplingParams(temperature=0)), ("d", asks)):
        host.new(name, prompts[name], sampling)
    for name, n in (("a", 3), ("e", 11), ("d", 9)):
        host.row(name, n)
    rows = host.step()
    assert rows["e"].logprobs is None
    for name in ("a", "d"):
        expected = reference.logits(prompts[name])[-1].log_softmax(-1)
        (entry,) = rows[name].logprobs
        assert (entry.token_id, entry.rank) == (rows[name].kept[0], 1)
        assert entry.logprob == pytest.approx(expected.max().item(), abs=1e-4)
        assert [pair[0] for pair in entry.top] == expected.topk(3).indices.tolist()


def test_durations_are_measured_by_the_given_clock(make_host, prompts):
    ticks = itertools.count()
    host = make_host(clock=lambda: float(next(ticks)))
    host.new("a", prompts["a"])
    host.row("a", 3)
    host.step()
    assert host.verdicts[0].durations == {"prepare": 2.0, "propose": 1.0, "forward": 1.0, "sample": 1.0, "observe": 1.0}


def test_more_requests_than_planned_for_find_room(make_host, reference, prompts):
    host = make_host(max_running=2)
    for name, prompt in prompts.items():
        host.new(name, prompt)
        host.row(name, len(prompt))
    host.step()
    for name, prompt in prompts.items():
        assert host.generate(name, 2) == reference.greedy(prompt, 3)[1:]


def test_a_name_that_comes_back_is_another_request(make_host, reference, prompts):
    host = make_host()
    host.new("x", prompts["a"])
    host.generate("x", 3)
    host.drop("x")
    host.new("x", prompts["d"])
    assert host.generate("x", 4) == reference.greedy(prompts["d"], 4)


def test_a_step_with_operations_alone_is_carried_out(make_host, prompts):
    host = make_host()
    host.new("a", prompts["a"])
    host.prefill("a")
    host.drop("a")
    assert host.step() == {}
    assert host.worker.execute(host.take()).rows == []


def test_the_arrays_of_a_step_in_flight_are_never_written_again(make_host, model, prompts, monkeypatch):
    layouts = []
    from hotswap.plugins.attention.torch_sdpa import TorchAttention

    plan = TorchAttention.plan

    def spy(self, state, layout):
        layouts.append(layout)
        plan(self, state, layout)

    monkeypatch.setattr(TorchAttention, "plan", spy)
    host = make_host()
    host.new("a", prompts["a"])
    host.prefill("a")
    kept = [(t, t.clone()) for t in _tensors(layouts)]
    for _ in range(3):
        host.row("a")
        host.step()
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    owners = [{t.untyped_storage().data_ptr() for t in _tensors([layout])} for layout in layouts[::2]]
    assert all(not one & other for one, other in itertools.combinations(owners, 2))


def _tensors(layouts):
    for layout in layouts:
        yield from (layout.query_starts, layout.positions, layout.kv_lens)
        for group in layout.groups.values():
            yield from (group.page_table, group.slots)
