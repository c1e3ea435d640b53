"""What the drawn workloads draw."""

from itertools import islice
from statistics import median

import pytest
from pydantic import ValidationError

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry
from hotswap.core.testing.workload import context
from hotswap.plugins.workloads.sessions import SessionsWorkload
from hotswap.plugins.workloads.synthetic import SyntheticWorkload


def synthetic(**options):
    return SyntheticWorkload(SyntheticWorkload.Options(**options))


def sessions(**options):
    return SessionsWorkload(SessionsWorkload.Options(**options))


def drawn(workload, count=2000, **given):
    return list(islice(workload.items(context(**given)), count))


def test_a_number_is_a_length_that_is_always_the_same():
    assert {(len(item.prompt), item.max_tokens) for item in drawn(synthetic(prompt=17, output=3), 50)} == {(17, 3)}


def test_uniform_lengths_fill_their_range():
    lengths = [len(item.prompt) for item in drawn(synthetic(prompt={"dist": "uniform", "low": 10, "high": 20}))]
    assert set(lengths) == set(range(10, 21))
    assert median(lengths) == 15


def test_lognormal_lengths_have_their_median_and_a_long_tail_up_to_the_greatest():
    tail = {"dist": "lognormal", "median": 100, "sigma": 1, "max": 400}
    lengths = [len(item.prompt) for item in drawn(synthetic(prompt=tail))]
    assert 92 < median(lengths) < 109
    assert max(lengths) == 400
    assert 0.06 < sum(length == 400 for length in lengths) / len(lengths) < 0.11  # P(z > ln 4) = 8.3 %


def test_the_declared_share_of_requests_begins_with_one_of_the_prefixes_and_the_rest_is_alike_nowhere():
    items = drawn(synthetic(families=4, share=0.75, prefix=32, prompt=16))
    members = [item for item in items if item.key]
    assert 0.72 < len(members) / len(items) < 0.78
    assert {item.key for item in members} == {f"family {number}" for number in range(4)}
    assert len({item.prompt[:32] for item in members}) == 4
    assert {(item.shared, len(item.prompt)) for item in members} == {(32, 48)}
    assert len({item.prompt[-16:] for item in items}) == len(items)


def test_changing_one_length_leaves_the_tokens_of_the_others_as_they_were():
    short, long = drawn(synthetic(prompt=8), 20), drawn(synthetic(prompt=8, output=50), 20)
    assert [item.prompt for item in short] == [item.prompt for item in long]


def test_a_workload_with_a_number_of_requests_ends():
    assert len(drawn(synthetic(requests=7))) == 7
    assert len({item.key for item in drawn(sessions(sessions=3))}) == 3


@pytest.mark.parametrize(("workload", "message"), [
    (synthetic(prompt=60, output=40), "prompt: prefix, prompt and output may come to 0 + 60 + 40 tokens, and the "
                                      "model's context has 99. Make them shorter."),
    (synthetic(prompt=30, output=10, families=1, prefix=60), "60 + 30 + 10"),
    (sessions(system=40, message=50, output=10), "the first turn may come to 40 + 50 + 10 tokens"),
])
def test_lengths_that_may_exceed_the_context_are_refused_before_anything_is_drawn(workload, message):
    with pytest.raises(ConfigError) as caught:
        workload.items(context(max_model_len=99))
    assert message in str(caught.value)
    assert workload.items(context(max_model_len=100))


def test_each_turn_says_all_that_was_said_before_with_an_answer_as_long_as_the_one_generated():
    items = drawn(sessions(turns=3, system=5, message=7, output=11, think=2, sessions=2))
    assert [(len(item.prompt), item.after, item.pause) for item in items] == [
        (12, None, 0), (30, 0, 2), (48, 1, 2), (12, None, 0), (30, 3, 2), (48, 4, 2)]
    assert [item.max_tokens for item in items] == [11] * 6
    assert items[1].prompt[:12] == items[0].prompt
    assert items[0].prompt[:5] == items[3].prompt[:5], "the system prompt is that of all sessions"
    assert items[0].prompt[5:] != items[3].prompt[5:]


def test_a_session_ends_when_its_context_is_full():
    items = drawn(sessions(turns=50, message=10, output=10, sessions=1), max_model_len=100)
    assert [len(item.prompt) for item in items] == [10, 30, 50, 70, 90]


@pytest.mark.parametrize(("options", "message"), [
    ({"prompt": {"dist": "uniform", "low": 9, "high": 3}}, "low (9) is above high (3)."),
    ({"prompt": {"dist": "lognormal", "median": 9, "sigma": 1}}, "is required."),
    ({"prompt": {"dist": "lognormal", "median": 9, "sigma": 1, "max": 3}}, "median (9) is above max (3)."),
    ({"prompt": {"dist": "pareto"}}, "'fixed', 'uniform', 'lognormal'"),
    ({"prompt": -1}, "greater than or equal to 0"),
    ({"share": 1.5}, "less than or equal to 1"),
    ({"prefix": 30}, "'prefix' and 'share' are of no use without 'families'"),
    ({"promt": 3}, "Did you mean 'workload.prompt'?"),
])
def test_a_wrong_option_is_explained_with_its_place(options, message):
    with pytest.raises(ConfigError) as caught:
        Registry().options("workload", ComponentRef(use="synthetic", **options), "workload")
    assert message in str(caught.value) and str(caught.value).startswith("workload")


def test_options_survive_the_way_through_json():
    options = SyntheticWorkload.Options(prompt={"dist": "uniform", "low": 1, "high": 3}, output=4)
    assert SyntheticWorkload.Options.model_validate(options.model_dump(mode="json")) == options
    with pytest.raises(ValidationError):
        SyntheticWorkload.Options(prompt=True)
