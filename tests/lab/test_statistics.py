"""Verdicts of experiments: that they are right as often as they claim, and never contradict their intervals."""

from itertools import islice
from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import norm, wilcoxon

from hotswap.lab.interleave import orders
from hotswap.lab.records import Better, Look, MetricSpec, Outcome, Pair
from hotswap.lab.statistics import Monitor, Settings, analyse
from hotswap.lab.statistics.boundary import Boundary
from hotswap.lab.statistics.signed_rank import interval, quads, scale, scores, walsh_averages

TIME = MetricSpec("time", "s", Better.LOWER, "seconds")
RATE = MetricSpec("rate", "tokens/s", Better.HIGHER, "tokens per second")
SHARE = MetricSpec("share", "share", Better.HIGHER, "hits per lookup", additive=True)
FAST = Settings(flips=1999)
DIRECTIONS = {Outcome.BETTER, Outcome.WORSE}


def in_quads(base, arm, metric=TIME, seed=0):
    """Pairs of values, the order drawn for two at a time."""
    first = np.random.default_rng(seed).integers(0, 2, len(base) // 2 + 1)
    return [Pair({metric.name: b}, {metric.name: a}, bool(first[i // 2] ^ (i % 2)))
            for i, (b, a) in enumerate(zip(base, arm, strict=True))]


def assigned(slots, effect, rng):
    """An experiment on ``slots`` [blocks, metrics], what each block measures whichever arm it gets; the arm's values
    are larger by the factor 1 + ``effect``."""
    pairs = []
    for quad in slots.reshape(-1, 4, slots.shape[1]):
        coin = bool(rng.integers(2))
        for (first, second), base_first in ((quad[:2], coin), (quad[2:], not coin)):
            base, arm = (first, second) if base_first else (second, first)
            pairs.append(Pair(named(base), named(arm * (1 + effect)), base_first))
    return pairs


def named(values):
    return {f"m{index}": value for index, value in enumerate(values)}


def metrics(n):
    return [MetricSpec(f"m{index}", "s", Better.LOWER, "seconds") for index in range(n)]


def monitored(pairs, specs, settings):
    """The comparisons when the monitor stops, and the share of the pairs it needed."""
    monitor = Monitor(["arm"], specs, settings)
    for done, pair in enumerate(pairs, 1):
        monitor.add("arm", pair)
        if monitor.enough(done / len(pairs)):
            break
    return monitor.finish(done / len(pairs)), done / len(pairs)


finite = st.floats(0.5, 2)
samples = st.lists(st.tuples(finite, finite), min_size=24, max_size=60).filter(lambda values: len(values) % 2 == 0)


@given(samples)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_swapped_arms_have_the_opposite_effect_and_verdict(values):
    base, arm = zip(*values, strict=True)
    there, = analyse({"arm": in_quads(base, arm)}, [TIME], FAST)
    back, = analyse({"arm": in_quads(arm, base)}, [TIME], FAST)
    assert np.log1p(there.effect) == pytest.approx(-np.log1p(back.effect), abs=1e-9)
    assert np.log1p([there.low, there.high]) == pytest.approx(-np.log1p([back.high, back.low]), abs=1e-9)
    opposite = {Outcome.BETTER: Outcome.WORSE, Outcome.WORSE: Outcome.BETTER}
    assert back.outcome is opposite.get(there.outcome, there.outcome)
    assert back.p == there.p


@given(samples, st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_other_units_leave_the_effect_alone(values, factor):
    base, arm = np.array(values).T
    one, = analyse({"arm": in_quads(base, arm)}, [TIME], FAST)
    other, = analyse({"arm": in_quads(base * factor, arm * factor)}, [TIME], FAST)
    assert (one.effect, one.low, one.high) == pytest.approx((other.effect, other.low, other.high), abs=1e-9)


@given(samples, st.sampled_from([0.0, 0.02, -0.1, 0.5]), st.sampled_from([0.005, 0.05, 0.4]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_estimate_interval_p_and_verdict_agree(values, effect, margin):
    base, arm = np.array(values).T
    found, = analyse({"arm": in_quads(base, arm * (1 + effect))}, [TIME], Settings(flips=1999, margin=margin))
    assert found.low <= found.effect <= found.high
    significant = found.p <= 0.05
    if found.low > 0 or found.high < 0:
        assert significant
    if significant:
        assert found.low >= 0 or found.high <= 0
    small = found.low >= 1 / (1 + margin) - 1 - 1e-12 and found.high <= margin + 1e-12
    if small:
        assert found.outcome is Outcome.NO_DIFFERENCE
    elif significant:
        assert found.outcome is (Outcome.WORSE if found.low >= 0 else Outcome.BETTER)
    else:
        assert found.outcome is Outcome.NOT_ENOUGH_DATA


def test_a_verdict_at_the_very_limit_has_the_p_of_the_limit():
    base, arm = [1.0] * 24, [2.0, 2.0] * 6 + [1.0, 1.0] * 6  # six ties among twelve quads, all others alike
    for flips in (999, 1999, 4999):
        found, = analyse({"arm": in_quads(base, arm)}, [TIME], Settings(flips=flips))
        assert (found.p <= 0.05) == (found.outcome is Outcome.WORSE)


def test_more_data_narrows_the_interval():
    rng = np.random.default_rng(4)
    base, arm = np.exp(0.05 * rng.standard_normal((2, 400)))
    widths = []
    for n in (24, 50, 100, 200, 400):
        found, = analyse({"arm": in_quads(base[:n], arm[:n])}, [TIME], FAST)
        widths.append(found.high - found.low)
    assert all(later < earlier for earlier, later in zip(widths, widths[1:], strict=False))
    assert widths[-1] == pytest.approx(widths[1] * np.sqrt(50 / 400), rel=0.25)


def test_one_metric_at_one_look_is_the_wilcoxon_test():
    rng = np.random.default_rng(2)
    differences = rng.standard_normal(25) + 0.4
    base, arm = np.ones(50), np.exp(np.repeat(differences, 2))
    found, = analyse({"arm": in_quads(base, arm)}, [TIME], Settings(flips=100_000))
    assert found.p == pytest.approx(wilcoxon(differences, method="exact").pvalue, rel=0.25)  # the ladder's steps


def test_the_statistic_at_a_shift_counts_the_walsh_averages_above_and_below_it():
    rng = np.random.default_rng(3)
    for differences in (rng.standard_normal(17), rng.integers(-2, 3, 17).astype(float)):
        averages = walsh_averages(differences)
        for shift in (0.0, 0.3, -1.0):
            assert scores(differences - shift).sum() == (averages > shift).sum() - (averages < shift).sum()


def test_the_interval_ends_where_the_test_begins_to_reject():
    differences = np.random.default_rng(5).standard_normal(30)
    limit = 2 * scale(30)
    low, high = interval(walsh_averages(differences), limit)
    for inside in (low + 1e-9, high - 1e-9):
        assert abs(scores(differences - inside).sum()) <= limit
    for outside in (low - 1e-9, high + 1e-9):
        assert abs(scores(differences - outside).sum()) > limit


def test_the_interval_covers_the_effect_as_often_as_it_claims_for_all_metrics_and_looks_together():
    rng, effect, covered = np.random.default_rng(8), 0.03, 0
    for _ in range(60):
        slots = np.exp(0.04 * rng.standard_t(3, (4 * 24, 1)) + 0.03 * rng.standard_t(3, (4 * 24, 6)))
        pairs = assigned(slots, effect, rng)
        covered += all(all(
            found.low <= effect <= found.high for found in analyse({"arm": pairs[:n]}, metrics(6), FAST, looks[:i]))
            for i, n in enumerate((16, 32, 48), 1) for looks in [[Look(k / 48, {"arm": k}) for k in (16, 32, 48)]])
    assert covered >= 53  # 57 are expected


def drifting(rng, blocks):
    return 0.3 * np.linspace(0, 1, blocks)


def autoregressive(rng, blocks):
    noise = rng.standard_normal(blocks)
    for index in range(1, blocks):
        noise[index] += 0.9 * noise[index - 1]
    return 0.03 * noise


def every_second_block_slow(rng, blocks):
    return 0.2 * (np.arange(blocks) % 2)


def with_bursts(rng, blocks):
    return 0.02 * rng.standard_normal(blocks) + np.where(rng.random(blocks) < 0.05, 1.5, 0.0)


NOISES = [drifting, autoregressive, every_second_block_slow, with_bursts]


def blocks_with(noise, rng, n_metrics, blocks):
    shared = noise(rng, blocks)[:, None]
    return np.exp(shared + 0.01 * rng.standard_normal((blocks, n_metrics)))


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_equal_arms_are_told_apart_in_at_most_the_claimed_share_of_experiments_that_may_stop_early(noise):
    rng, specs, wrong = np.random.default_rng(7), metrics(8), 0
    for _ in range(60):
        pairs = assigned(blocks_with(noise, rng, 8, 4 * 24), 0.0, rng)
        found, _ = monitored(pairs, specs, Settings(flips=999, looks=4, margin=1e-6))
        wrong += any(one.outcome in DIRECTIONS for one in found)
    assert wrong <= 7  # 3 are expected


def test_arms_that_share_the_base_and_the_order_of_a_run_are_told_apart_as_seldom():
    rng, names, wrong = np.random.default_rng(5), ["base", "one", "two", "three"], 0
    for number in range(60):
        slots = iter(blocks_with(autoregressive, rng, 4, 4 * 40))
        by_arm = {name: [] for name in names[1:]}
        for order in islice(orders(names, number), 40):
            found = {name: named(next(slots)) for name in order}
            for name, pairs in by_arm.items():
                pairs.append(Pair(found["base"], found[name], order.index("base") < order.index(name)))
        compared = analyse(by_arm, metrics(4), Settings(flips=999, margin=1e-6))
        wrong += any(one.outcome in DIRECTIONS for one in compared)
    assert wrong <= 7  # 3 are expected


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_a_slowdown_is_found_under_every_kind_of_noise(noise):
    rng, specs, found_it = np.random.default_rng(9), metrics(8), 0
    for _ in range(20):
        pairs = assigned(blocks_with(noise, rng, 8, 4 * 40), 0.05, rng)
        found, _ = monitored(pairs, specs, Settings(flips=1999, looks=6))
        assert all(one.outcome is not Outcome.BETTER for one in found)
        found_it += any(one.outcome is Outcome.WORSE for one in found)
    assert found_it >= 18


def test_every_metric_and_arm_more_makes_a_verdict_harder():
    rng = np.random.default_rng(1)
    base, arm = np.exp(0.05 * rng.standard_normal((2, 60)))
    arm = arm * 1.04
    alone, = analyse({"arm": in_quads(base, arm)}, [TIME], FAST)
    others = {f"other{i}": in_quads(*np.exp(0.05 * rng.standard_normal((2, 60))), seed=i) for i in range(9)}
    among = analyse({"arm": in_quads(base, arm), **others}, [TIME], FAST)[0]
    assert among.low < alone.low and among.high > alone.high and among.p > alone.p


def test_metrics_that_repeat_each_other_cost_nothing():
    rng = np.random.default_rng(1)
    slots = np.repeat(np.exp(0.05 * rng.standard_normal((80, 1))), 12, axis=1)
    pairs = assigned(slots, 0.02, rng)
    assert analyse({"arm": pairs}, metrics(12), FAST)[0].low == analyse({"arm": pairs}, metrics(1), FAST)[0].low


def test_looks_spend_as_planned_and_never_more():
    rng, alpha, looks = np.random.default_rng(6), 0.05, 5
    outside, early = 0, 0
    paths = np.abs(np.cumsum(rng.standard_normal((9999, looks)), axis=1) / np.sqrt(np.arange(1, looks + 1)))
    boundary = Boundary(alpha, 2.0, len(paths))
    critical = [boundary.look(paths[:, k], (k + 1) / looks) for k in range(looks)]
    fresh = np.abs(np.cumsum(rng.standard_normal((20_000, looks)), axis=1) / np.sqrt(np.arange(1, looks + 1)))
    outside = np.any(fresh > critical, axis=1).mean()
    early = np.any(fresh[:, :2] > critical[:2], axis=1).mean()
    assert outside == pytest.approx(alpha, abs=0.006)
    assert early == pytest.approx(alpha * (2 / looks) ** 2, abs=0.003)
    assert norm.isf(alpha / 2) < critical[-1] < norm.isf(alpha / 2) + 0.25
    assert critical == sorted(critical, reverse=True)


def test_looking_at_every_pair_without_a_boundary_would_go_wrong_and_the_monitor_does_not():
    rng, naive, sound = np.random.default_rng(12), 0, 0
    for _ in range(60):
        pairs = assigned(np.exp(0.05 * rng.standard_normal((4 * 40, 1))), 0.0, rng)
        naive += any(wilcoxon(quads(pairs[:n], metrics(1)[0])).pvalue <= 0.05 for n in range(12, 81, 2))
        sound += monitored(pairs, metrics(1), Settings(flips=999, margin=1e-6))[0][0].outcome in DIRECTIONS
    assert naive >= 9 and sound <= 7


def test_a_large_difference_ends_the_run_early_and_a_small_one_does_not():
    rng = np.random.default_rng(0)
    slots = np.exp(0.03 * rng.standard_normal((4 * 60, 2)))
    found, share = monitored(assigned(slots, 0.5, rng), metrics(2), FAST)
    assert share < 0.35 and all(one.outcome is Outcome.WORSE for one in found)
    found, share = monitored(assigned(slots, 0.004, rng), metrics(2), Settings(flips=1999, margin=0.001))
    assert share == 1


def test_equal_arms_end_the_run_once_no_difference_larger_than_the_margin_is_sure():
    rng = np.random.default_rng(0)
    found, share = monitored(assigned(np.exp(0.01 * rng.standard_normal((400, 3))), 0.0, rng), metrics(3), FAST)
    assert share < 1 and all(one.outcome is Outcome.NO_DIFFERENCE for one in found)


def test_a_run_until_the_interval_is_narrow_ends_with_one_that_is():
    rng = np.random.default_rng(0)
    pairs = assigned(np.exp(0.05 * rng.standard_normal((800, 1))), 0.2, rng)
    found, share = monitored(pairs, metrics(1), Settings(flips=1999, stop="width", width=0.03))
    assert share < 1 and (found[0].high - found[0].low) / 2 <= 0.03


def test_a_run_for_its_time_looks_once():
    rng = np.random.default_rng(0)
    pairs = assigned(np.exp(0.01 * rng.standard_normal((160, 1))), 0.5, rng)
    timed = Settings(flips=1999, stop="time")
    found, share = monitored(pairs, metrics(1), timed)
    assert share == 1 and found == analyse({"arm": pairs}, metrics(1), timed)


def test_the_run_waits_only_for_the_metrics_that_decide():
    rng = np.random.default_rng(0)
    slots = np.exp(np.array([0.01, 2.0]) * rng.standard_normal((240, 2)))
    _, all_of_them = monitored(assigned(slots, 0.1, np.random.default_rng(1)), metrics(2), FAST)
    _, one = monitored(assigned(slots, 0.1, np.random.default_rng(1)), metrics(2), Settings(flips=1999, decide=["m0"]))
    assert one < all_of_them == 1


@pytest.mark.parametrize("chosen", [{}, {"stop": "width", "width": 0.05}], ids=["verdicts", "width"])
def test_a_metric_that_no_block_can_tell_keeps_no_run_going_unless_it_is_named(chosen):
    rng = np.random.default_rng(0)
    pairs = assigned(np.exp(0.01 * rng.standard_normal((240, 2))), 0.1, rng)
    with_goodput = [*metrics(2), MetricSpec("goodput", "requests/s", Better.HIGHER, "", additive=True)]
    alone, share = monitored(pairs, metrics(2), Settings(flips=1999, **chosen))
    among, as_early = monitored(pairs, with_goodput, Settings(flips=1999, **chosen))
    assert as_early == share < 1
    assert among[:2] == alone, "nor does it cost the others certainty"
    assert monitored(pairs, with_goodput, Settings(flips=1999, decide=["m0", "goodput"], **chosen))[1] == 1


def test_a_run_without_any_data_is_not_over_because_nothing_is_open():
    monitor = Monitor(["arm"], metrics(2), FAST)
    for first in (True, False):
        monitor.add("arm", Pair({}, {}, first))
    assert monitor.enough(0.9) is None and monitor.looks


def test_the_looks_of_a_run_give_its_comparisons_again():
    rng = np.random.default_rng(3)
    pairs = assigned(np.exp(0.03 * rng.standard_normal((160, 2))), 0.05, rng)
    monitor = Monitor(["arm"], metrics(2), FAST)
    for done, pair in enumerate(pairs, 1):
        monitor.add("arm", pair)
        if monitor.enough(done / 80):
            break
    assert len(monitor.looks) > 1
    assert monitor.finish(done / 80) == analyse({"arm": pairs[:done]}, metrics(2), FAST, monitor.looks)


def test_a_run_that_is_broken_off_has_only_the_error_of_its_time_to_spend():
    rng = np.random.default_rng(3)
    pairs = assigned(np.exp(0.03 * rng.standard_normal((80, 1))), 0.0, rng)
    monitor = Monitor(["arm"], metrics(1), FAST)
    for pair in pairs:
        monitor.add("arm", pair)
        monitor.enough(0.01)
    broken_off, = monitor.finish(0.3)
    whole, = analyse({"arm": pairs}, metrics(1), FAST)
    assert broken_off.high - broken_off.low > whole.high - whole.low


def test_arms_that_are_not_as_far_are_not_looked_at():
    monitor = Monitor(["a", "b"], [TIME], FAST)
    first, second = in_quads([1.0, 1.0], [1.0, 1.0])
    assert first.base_first != second.base_first
    for arm, pair in (("a", first), ("a", second), ("b", first)):
        monitor.add(arm, pair)
        assert monitor.enough(1) is None and not monitor.looks
    monitor.add("b", second)
    assert monitor.enough(1) == "time is over"


def test_too_few_pairs_are_not_enough_data_whatever_they_say():
    found, = analyse({"arm": in_quads([1.0] * 6, [2.0] * 6)}, [TIME], FAST)
    assert found.outcome is Outcome.NOT_ENOUGH_DATA
    assert (found.effect, found.low, found.high) == (pytest.approx(1), -1, inf)


def test_one_quad_of_equal_values_is_not_enough_data():
    found, = analyse({"arm": in_quads([1.0] * 2, [1.0] * 2)}, [TIME], FAST)
    assert found.outcome is Outcome.NOT_ENOUGH_DATA


def test_an_arm_without_data_has_no_estimate():
    found, = analyse({"arm": []}, [TIME], FAST)
    assert found.outcome is Outcome.NOT_ENOUGH_DATA and isnan(found.effect) and found.n_pairs == 0


def test_a_pair_that_lacks_a_metric_takes_its_quad_out_of_this_metric_only():
    rng = np.random.default_rng(1)
    slots = np.exp(0.01 * rng.standard_normal((120, 2)))
    pairs = assigned(slots, 0.2, rng)
    pairs[3] = Pair({"m0": pairs[3].base["m0"]}, pairs[3].arm, pairs[3].base_first)
    whole, less = analyse({"arm": pairs}, metrics(2), FAST)
    assert whole.outcome is less.outcome is Outcome.WORSE
    assert (whole.n_pairs, less.n_pairs) == (60, 59)


def test_the_same_value_in_all_blocks_is_no_difference():
    for metric in (TIME, SHARE):
        found, = analyse({"arm": in_quads([0.5] * 40, [0.5] * 40, metric)}, [metric], FAST)
        assert (found.effect, found.low, found.high, found.outcome) == (0, 0, 0, Outcome.NO_DIFFERENCE)


def test_shares_are_compared_as_differences():
    rng = np.random.default_rng(1)
    base = rng.uniform(0, 0.02, 60)
    found, = analyse({"arm": in_quads(base, base + 0.3, SHARE)}, [SHARE], FAST)
    assert found.outcome is Outcome.BETTER and found.effect == pytest.approx(0.3)


def test_the_margin_of_a_difference_is_in_points_of_a_share_and_else_a_part_of_the_base():
    for unit, margin in (("share", 0.02), ("requests/s", 0.8)):
        metric = MetricSpec("share", unit, Better.HIGHER, "", additive=True)
        pairs = in_quads([40.0] * 40, [40.0] * 40, metric)
        found, = analyse({"arm": pairs}, [metric], Settings(flips=999, margin=0.02))
        assert found.margin == pytest.approx(margin)
    named, = analyse({"arm": pairs}, [metric], Settings(flips=999, margins={"share": 3.0}))
    assert named.margin == 3.0


def test_an_arm_that_reaches_nothing_is_worse_by_all_of_it_and_unbounded_latency_is_worse():
    found, = analyse({"arm": in_quads([9.0] * 40, [0.0] * 40, RATE)}, [RATE], FAST)
    assert found.outcome is Outcome.WORSE and found.effect == pytest.approx(-1, abs=1e-5)
    found, = analyse({"arm": in_quads([0.1] * 40, [inf] * 40)}, [TIME], FAST)
    assert found.outcome is Outcome.WORSE and found.arm_value == inf


def test_the_verdict_of_a_metric_follows_its_direction():
    for metric, outcome in ((TIME, Outcome.WORSE), (RATE, Outcome.BETTER)):
        found, = analyse({"arm": in_quads([1.0] * 60, [1.3] * 60, metric)}, [metric], FAST)
        assert found.outcome is outcome


def test_a_difference_that_is_sure_and_surely_within_the_margin_is_none():
    rng = np.random.default_rng(1)
    base = np.exp(0.001 * rng.standard_normal(100))
    for margin, outcome in ((0.01, Outcome.NO_DIFFERENCE), (0.001, Outcome.WORSE)):
        found, = analyse({"arm": in_quads(base, base * 1.004)}, [TIME], Settings(flips=1999, margin=margin))
        assert found.low > 0 and found.outcome is outcome


def test_values_that_a_metric_cannot_have_are_refused():
    with pytest.raises(ValueError, match="time is -1.0 in a pair"):
        quads(in_quads([1.0, 1.0], [-1.0, 1.0]), TIME)
    with pytest.raises(ValueError, match="time is NaN"):
        quads(in_quads([1.0, 1.0], [float("nan"), 1.0]), TIME)
    with pytest.raises(ValueError, match="share is additive and infinite"):
        quads(in_quads([1.0, 1.0], [inf, 1.0], SHARE), SHARE)


def test_pairs_whose_order_was_not_drawn_in_quads_are_refused():
    pairs = [Pair({"time": 1.0}, {"time": 1.0}, True)] * 2
    with pytest.raises(ValueError, match="pairs come in quads"):
        quads(pairs, TIME)


def test_settings_that_contradict_themselves_are_refused():
    for wrong in ({"stop": "width"}, {"width": 0.1}, {"confidence": 1.0}, {"looks": 0}):
        with pytest.raises(ValidationError):
            Settings(**wrong)
    for wrong in ({"decide": ["tme"]}, {"margins": {"tme": 0.1}}):
        with pytest.raises(ValueError, match="'tme' is no metric of this experiment; there are time"):
            Monitor(["arm"], [TIME], Settings(**wrong))
