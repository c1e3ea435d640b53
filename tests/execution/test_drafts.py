"""Drafts in the runner: they change the speed and nothing else, whatever is proposed."""

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.kvcache import CacheSpec
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.speculator import Drafts, SpeculatorNeeds
from hotswap.core.request import SamplingParams
from hotswap.plugins.logits_processors.penalties import Penalties
from hotswap.plugins.speculators.ngram import NgramSpeculator

COUNT = 14


@pytest.fixture
def answers(reference, prompts):
    return {name: reference.greedy(prompt, COUNT + 8) for name, prompt in prompts.items()}


@pytest.fixture
def plans(prompts, answers):
    """What a speculator may say, from right to absurd."""

    def right(request, tokens, slots):
        done = len(tokens) - len(prompts[request])
        return answers[request][done : done + slots]

    def wrong(request, tokens, slots):
        return [(token + 1) % 60 for token in right(request, tokens, slots)]

    def half(request, tokens, slots):
        return right(request, tokens, slots)[:1] + wrong(request, tokens, slots)[1:]

    return {
        "right": right, "wrong": wrong, "half": half,
        "ragged": lambda *asked: right(*asked)[: len(asked[1]) % 4],
        "too many": lambda request, tokens, slots: right(request, tokens, slots + 5),
        "no token": lambda *asked: [*right(*asked)[:1], 10_000, -3],
    }


@pytest.mark.parametrize("plan", ["right", "wrong", "half", "ragged", "too many", "no token"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_are_those_without_drafts(make_host, script, plans, prompts, answers, plan, page_size):
    host = make_host(page_size, speculator=script(plans[plan]))
    names = ("a", "d", "e")
    for name in names:
        host.new(name, prompts[name])
        host.row(name, len(prompts[name]), drafts=3)
    host.step()
    while min(len(host.tokens[name]) - len(prompts[name]) for name in names) < COUNT:
        for name in names:
            host.row(name, 1, drafts=3)
        host.step()
    for name in names:
        assert host.tokens[name][len(prompts[name]) :][:COUNT] == answers[name][:COUNT]


def test_true_lengths_count_accepted_drafts_only(make_host, script, plans, prompts, answers):
    speculator = script(plans["half"])
    host = make_host(speculator=speculator)
    host.new("d", prompts["d"])
    host.row("d", 9, drafts=3)
    row = host.step()["d"]
    assert (row.kept, row.drafted, row.accepted) == (answers["d"][:2], 3, 1)
    assert row.computed == 10
    assert speculator.observed == [("d", 3, 1)]


def test_chained_steps_follow_the_true_length(make_host, script, plans, prompts, answers):
    host = make_host(speculator=script(plans["half"]))
    host.new("d", prompts["d"])
    host.row("d", 9, drafts=3)
    messages = [host.take()]
    for _ in range(3):
        host.row("d", 1, drafts=3)
        messages.append(host.take())
    for verdict in [host.worker.execute(message) for message in messages]:
        host.absorb(verdict)
    assert host.tokens["d"][9:] == answers["d"][:8]


def test_a_row_that_stops_short_gets_no_drafts(make_host, script, prompts):
    slots_seen = []
    host = make_host(speculator=script(lambda request, tokens, slots: slots_seen.append(slots) or []))
    host.new("e", prompts["e"])
    host.row("e", 10, drafts=3)
    host.step()
    assert slots_seen == [0]


def test_tokens_after_an_end_of_text_inside_a_block_are_left_to_the_host(make_host, script, plans, prompts, answers):
    """The worker reports all verified tokens; cutting at a stop is the engine's, once, for all paths."""
    host = make_host(speculator=script(plans["right"]))
    host.new("d", prompts["d"], eos_token_ids=frozenset({answers["d"][1]}))
    host.row("d", 9, drafts=3)
    assert host.step()["d"].kept == answers["d"][:4]


def test_logprobs_of_accepted_drafts_are_those_of_their_positions(
    make_host, script, plans, prompts, answers, reference,
):
    host = make_host(speculator=script(plans["half"]))
    host.new("d", prompts["d"], SamplingParams(temperature=0, logprobs=1))
    host.row("d", 9, drafts=3)
    row = host.step()["d"]
    for i, entry in enumerate(row.logprobs):
        expected = reference.logits(prompts["d"] + answers["d"][:i])[-1].log_softmax(-1)
        assert entry.token_id == answers["d"][i]
        assert entry.logprob == pytest.approx(expected.max().item(), abs=1e-4)
    assert len(row.logprobs) == 2


def test_seeded_samples_are_those_without_drafts(make_host, script, plans, prompts):
    hot = SamplingParams(temperature=1.2, top_k=20)
    plain, drafting = make_host(), make_host(speculator=script(plans["half"]))
    for host in (plain, drafting):
        host.new("d", prompts["d"], hot, seed=11)
    assert plain.generate("d", COUNT) == drafting.generate("d", COUNT, drafts=3)


def test_penalties_count_kept_tokens_only(make_host, script, plans, prompts):
    frequent = SamplingParams(temperature=0, frequency_penalty=1.5)
    plain = make_host(processors=[Penalties()])
    drafting = make_host(processors=[Penalties()], speculator=script(plans["half"]))
    for host in (plain, drafting):
        host.new("d", prompts["d"], frequent)
    assert plain.generate("d", 40) == drafting.generate("d", 40, drafts=3)


class Recorder(LogitsProcessor):
    """Makes token 0 the best, and remembers what it was told."""

    def __init__(self):
        super().__init__()
        self.rows, self.kept = [], []

    def wants(self, request):
        return True

    def begin(self, request): ...

    def apply(self, logits, rows):
        self.rows += rows
        logits[:, 0] = 1000.0

    def accept(self, request, kept):
        self.kept += kept


def test_a_processor_is_told_the_drafts_before_each_position(make_host, script, prompts):
    recorder = Recorder()
    host = make_host(processors=[recorder], speculator=script(lambda *asked: [0, 0, 5]))
    host.new("d", prompts["d"])
    host.row("d", 9, drafts=3)
    host.step()
    assert recorder.rows == [(0, "d", ()), (1, "d", (0,)), (2, "d", (0, 0)), (3, "d", (0, 0, 5))]
    assert recorder.kept == [0, 0, 0]


def test_logprobs_are_those_of_the_model_before_processors(make_host, prompts, reference):
    host = make_host(processors=[Recorder()])
    host.new("d", prompts["d"], SamplingParams(temperature=0, logprobs=0))
    (entry,) = host.prefill("d").logprobs
    expected = reference.logits(prompts["d"])[-1].log_softmax(-1)
    assert (entry.token_id, entry.logprob) == (0, pytest.approx(expected[0].item(), abs=1e-4))


def test_prompt_lookup_says_the_same_in_fewer_steps(make_host, reference, prompts):
    loop = prompts["e"][:6] * 4
    host = make_host(speculator=NgramSpeculator(NgramSpeculator.Options(min_n=1)))
    host.new("a", loop)
    assert host.generate("a", 30, drafts=4) == reference.greedy(loop, 30)


def test_the_speculator_forgets_what_is_dropped_or_suspended(make_host, script, prompts):
    speculator = script(lambda *asked: [])
    host = make_host(speculator=speculator)
    for name in ("a", "d"):
        host.new(name, prompts[name])
        host.prefill(name)
    host.drop("a")
    host.suspend("d")
    host.step()
    assert sorted(speculator.forgotten) == ["a", "d"]


class Sampling(NgramSpeculator):
    """Proposes token 7 and says that it was drawn from a distribution over 7 and 8."""

    def propose(self, rows):
        probs = torch.zeros(4, 61)
        probs[:, 7] = probs[:, 8] = 0.5
        return Drafts([[7] * row.slots for row in rows], [probs[: row.slots] for row in rows])


def test_drafts_with_probabilities_reach_the_verifier(make_host, prompts):
    host = make_host(speculator=Sampling())
    names = list(prompts)[:3]
    for name in names:
        host.new(name, prompts[name], SamplingParams(temperature=2.0), seed=3)
        host.row(name, len(prompts[name]), drafts=len(name))
    rows = host.step()
    assert all(len(rows[name].kept) == rows[name].accepted + 1 for name in names)


def test_a_proposal_that_raises_is_dropped_counted_and_named_and_the_next_one_is_taken(
    make_host, script, plans, prompts, answers, caplog,
):
    calls = []

    def plan(*asked):
        calls.append(asked)
        if len(calls) in (2, 3):
            raise ValueError("planted")
        return plans["right"](*asked)

    host = make_host(speculator=script(plan))
    host.new("d", prompts["d"])
    assert host.generate("d", COUNT, drafts=3) == answers["d"][:COUNT]
    assert [verdict.counts.get("dropped_proposals", 0) for verdict in host.verdicts][:4] == [0, 1, 1, 0]
    assert sum(row.accepted for verdict in host.verdicts for row in verdict.rows) > 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "speculator:Script made no proposal, which is dropped and counted from now on: speculator 'Script' raised in "
        "propose: ValueError: planted"]


def test_what_is_no_proposal_at_all_is_dropped_by_name(make_host, script, prompts, answers, caplog):
    host = make_host(speculator=script(lambda request, tokens, slots: [None] * slots))
    host.new("d", prompts["d"])
    assert host.generate("d", COUNT, drafts=3) == answers["d"][:COUNT]
    assert host.verdicts[1].counts["dropped_proposals"] == 1
    assert "speculator 'Script' raised in propose: TypeError: int() argument must be" in caplog.text


def nonsense(kind):
    """A speculator that says what makes no sense, in one of several ways."""

    class Nonsense(NgramSpeculator):
        def propose(self, rows):
            tokens = [[7] * row.slots for row in rows]
            probs = torch.zeros(4, 61)
            probs[:, 7] = probs[:, 8] = 0.5
            rows_probs = [probs[: row.slots].clone() for row in rows]
            if kind == "ids beyond the vocabulary":
                return Drafts([[7, 61, 7][: row.slots] for row in rows])
            if kind == "negative ids":
                return Drafts([[-1] * row.slots for row in rows])
            if kind == "more drafts than slots":
                return Drafts([[*row_tokens, 7, 7] for row_tokens in tokens])
            if kind == "another number of rows":
                return Drafts([*tokens, [7]])
            if kind == "probabilities of another number of rows":
                return Drafts(tokens, [*rows_probs, None])
            for q in rows_probs:
                if kind == "NaN":
                    q[:, 3] = torch.nan
                elif kind == "no distribution":
                    q *= 1.5
                elif kind == "negative probabilities":
                    q[:, 8], q[:, 9] = 1.0, -0.5
                elif kind == "a draft of probability 0":
                    q[:, 7], q[:, 8] = 0.0, 1.0
            if kind == "another width":
                rows_probs = [q[:, :60] for q in rows_probs]
            if kind == "another precision":
                rows_probs = [q.bfloat16() for q in rows_probs]
            return Drafts(tokens, rows_probs)

    return Nonsense()


KINDS_OF_NONSENSE = [
    "ids beyond the vocabulary", "negative ids", "more drafts than slots", "another number of rows",
    "probabilities of another number of rows", "NaN", "no distribution", "negative probabilities",
    "a draft of probability 0", "another width", "another precision",
]


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize("kind", KINDS_OF_NONSENSE)
def test_what_makes_no_sense_is_dropped_and_counted_and_changes_no_token(make_host, prompts, kind, temperature):
    """A seeded request gets the very tokens that it gets without drafts."""
    params = SamplingParams(temperature=temperature)
    plain, drafting = make_host(), make_host(speculator=nonsense(kind))
    for host in (plain, drafting):
        host.new("d", prompts["d"], params, seed=11)
    assert plain.generate("d", COUNT) == drafting.generate("d", COUNT, drafts=3)
    dropped = sum(verdict.counts.get("dropped_proposals", 0) for verdict in drafting.verdicts)
    believed = temperature == 0 and kind in (  # greedy drafts are compared with the best token, whatever else is said
        "NaN", "no distribution", "negative probabilities", "a draft of probability 0")
    assert (dropped > 0) is not believed


def test_a_tree_is_dropped_by_name(make_host, prompts, caplog):
    class Tree(NgramSpeculator):
        def propose(self, rows):
            return Drafts([[7, 8] for _ in rows], parents=[[-1, -1] for _ in rows])

    host = make_host(speculator=Tree())
    host.new("a", prompts["a"])
    host.row("a", 3, drafts=2)
    assert host.step()["a"].drafted == 0
    assert host.verdicts[0].counts["dropped_proposals"] == 1
    assert "speculator:Tree made what makes no sense" in caplog.text
    assert "parents [-1, -1], a tree, but the verifier takes chains only" in caplog.text


def test_a_chain_may_say_that_it_is_one(make_host, script, plans, prompts, answers):
    class Chain(type(script(None))):
        def propose(self, rows):
            drafts = super().propose(rows)
            return Drafts(drafts.tokens, parents=[list(range(-1, len(tokens) - 1)) for tokens in drafts.tokens])

    host = make_host(speculator=Chain(plans["right"]))
    host.new("d", prompts["d"])
    assert host.generate("d", COUNT, drafts=3) == answers["d"][:COUNT]


class Behind(NgramSpeculator):
    """Has a cache group of its own, which is always some tokens behind."""

    behind = 2

    def needs(self):
        spec, shape = CacheSpec("own", (9,), 2, 8, 128), GroupShape(4, 2, 8, 0, 1.0)
        return SpeculatorNeeds(lookahead=2, cache_specs=(spec,), shapes={"own": shape})

    def observe(self, rows, taps):
        return [self.behind for _ in rows]


def test_how_far_its_own_groups_are_behind_is_told_in_verdicts_and_at_suspensions(make_host, prompts):
    host = make_host(speculator=Behind())
    host.new("d", prompts["d"])
    host.row("d", 9)
    row = host.step()["d"]
    assert (row.computed, row.lag) == (9, 2)
    host.suspend("d")
    verdict = host.worker.execute(host.take())
    assert verdict.suspended[0].computed == {"full": 9, "window": 9, "own": 7}


def test_requests_whose_proposal_raised_are_forgotten_by_one_with_a_cache_and_their_pages_are_not_trusted(
    make_host, prompts,
):
    """It is not asked for them again: its cache lacks what the failed step would have put there. Others come to nothing
    by it, and the same request is as good as new once it comes again."""
    asked, observed, forgotten = [], [], []

    class Forgetful(Behind):
        behind, failing = 0, False

        def propose(self, rows):
            asked.append([row.request for row in rows])
            if self.failing:
                raise ValueError("planted")
            return Drafts([[7] * row.slots for row in rows], [torch.eye(61)[[7] * row.slots] for row in rows])

        def observe(self, rows, taps):
            observed.append([row.request for row in rows])
            return super().observe(rows, taps)

        def forget(self, request_ids):
            forgotten.extend(request_ids)

    speculator = Forgetful()
    host = make_host(speculator=speculator)
    host.new("d", prompts["d"])
    host.row("d", 4)
    assert host.step()["d"].lag == 0
    speculator.failing = True
    host.row("d", 5, drafts=2)
    row = host.step()["d"]
    assert (row.computed, row.lag, row.drafted) == (9, 5, 0)
    assert host.verdicts[-1].counts["dropped_proposals"] == 1
    speculator.failing = False
    host.new("a", prompts["a"])
    host.row("d", 1, drafts=2)
    host.row("a", len(prompts["a"]), drafts=2)
    rows = host.step()
    assert (rows["d"].lag, rows["d"].drafted) == (6, 0)
    assert (rows["a"].lag, rows["a"].drafted) == (0, 2)
    assert (asked, observed) == ([["d"], ["d"], ["a"]], [["d"], [], ["a"]])
    assert forgotten == ["d"]
    host.suspend("d")
    verdict = host.worker.execute(host.take())
    assert verdict.suspended[0].computed == {"full": 10, "window": 10, "own": 4}
    host.new("d", host.tokens["d"])
    host.row("d", len(host.tokens["d"]), drafts=2)
    assert host.step()["d"].drafted == 2
    assert forgotten == ["d"], "which it had forgotten already"


def test_its_own_groups_get_pages_like_the_models(make_host, prompts):
    host = make_host(speculator=Behind())
    assert [spec.group for spec in host.worker.info().cache_specs] == ["full", "window", "own"]
    host.new("d", prompts["d"])
    host.row("d", 9)
    message = host.take()
    del message.grants[0][1].groups["own"]
    assert host.worker.execute(message).error is None, "the model does not need them"


def test_lags_of_another_number_of_rows_are_the_speculators_fault(make_host, prompts):
    class Miscounting(Behind):
        def observe(self, rows, taps):
            return [0, 0]

    host = make_host(speculator=Miscounting())
    host.new("a", prompts["a"])
    host.row("a", 3)
    error = host.worker.execute(host.take()).error
    assert error == "speculator 'Miscounting' raised in observe: ValueError: 2 lags for 1 rows"


class Needy(NgramSpeculator):
    def needs(self):
        return SpeculatorNeeds(lookahead=2, taps=("layer:7",))


def test_hidden_states_that_the_model_does_not_give_are_refused(make_host):
    with pytest.raises(ConfigError, match="reads the hidden states layer:7, but .* gives none"):
        make_host(speculator=Needy())
