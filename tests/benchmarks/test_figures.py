"""From records to figures, from figures to medians, ratios and tables."""

import pytest

from hotswap.lab.records import BlockRecord, RequestRecord


def record(index, sent, times, prompt=10):
    return RequestRecord(
        index, sent, sent, tuple((time, 1) for time in times), times[-1], prompt, len(times))


def run(engine, number, value, load="single", figure="tpot_p50_ms", others=0.0, error=None):
    from benchmarks.cpu.figures import Run

    figures = {} if error else {figure: value, "memory_mib": 100.0}
    return Run(engine, "offline", load, number, figures, others, error)


def test_figures_are_those_that_one_computes_by_hand():
    from benchmarks.cpu.figures import figures_of

    block = BlockRecord("batch8", 0, 0, 4.0, (record(0, 0.0, [1.0, 2.0, 3.0]), record(1, 0.5, [1.5, 2.5, 3.5])))
    figures = figures_of(block)
    assert figures["wall_s"] == 4 and figures["out_tok_s"] == 6 / 4 and figures["total_tok_s"] == 26 / 4
    assert figures["req_s"] == 0.5 and figures["decode_tok_s"] == pytest.approx(4 / 2.5)
    assert figures["ttft_p50_ms"] == 1000 and figures["tpot_p50_ms"] == 1000 and figures["itl_p99_ms"] == 1000


def test_a_run_beside_a_busy_neighbour_is_left_out_of_medians_and_ratios():
    from benchmarks.cpu.figures import ratio_of, spread_of

    runs = [run("hotswap", 1, 10), run("peer", 1, 20), run("hotswap", 2, 99, others=0.26), run("peer", 2, 20),
            run("hotswap", 3, 10), run("peer", 3, 30, others=0.25)]
    assert spread_of(runs, "hotswap", "single", "tpot_p50_ms") == (10, 10, 10, 2)
    assert ratio_of(runs, "hotswap", "peer", "single", "tpot_p50_ms") == (2.5, 2, 3, 2)


def test_ratios_say_how_many_times_as_good_whether_more_or_less_is_better():
    from benchmarks.cpu.figures import ratio_of

    faster = [run("hotswap", 1, 300, "mixed", "out_tok_s"), run("peer", 1, 200, "mixed", "out_tok_s")]
    sooner = [run("hotswap", 1, 2, "prefix", "wall_s"), run("peer", 1, 3, "prefix", "wall_s")]
    assert ratio_of(faster, "hotswap", "peer", "mixed", "out_tok_s").median == 1.5
    assert ratio_of(sooner, "hotswap", "peer", "prefix", "wall_s").median == 1.5


def test_ratios_are_paired_by_round_and_not_taken_of_medians():
    from benchmarks.cpu.figures import ratio_of

    slow_machine = {1: 1.0, 2: 3.0, 3: 1.0}
    runs = [run(name, number, base * slow_machine[number])
            for name, base in (("hotswap", 10), ("peer", 15)) for number in slow_machine]
    assert ratio_of(runs, "hotswap", "peer", "single", "tpot_p50_ms") == (1.5, 1.5, 1.5, 3)


def test_a_server_is_compared_with_its_own_engine_in_the_same_round():
    from benchmarks.cpu.figures import share_of_offline
    from benchmarks.cpu.table import tables

    runs = [run("hotswap", 1, 90, "http", "out_tok_s"), run("hotswap", 1, 100, "offline16", "out_tok_s"),
            run("hotswap", 2, 10, "http", "out_tok_s"), run("hotswap", 2, 100, "offline16", "out_tok_s", others=1.0)]
    assert share_of_offline(runs, "hotswap") == (0.9, 0.9, 0.9, 1)
    assert "hotswap: its server gives 0.90× the output tokens/s" in tables(runs, "hotswap")


def test_the_table_has_the_best_first_and_says_what_was_left_out():
    from benchmarks.cpu.table import tables

    text = tables([
        run("hotswap", 1, 10), run("peer", 1, 5), run("hotswap", 2, 12), run("peer", 2, 6, others=1.0),
        run("broken", 1, 0, error="Traceback\nIt fell over")], "hotswap")
    lines = text.splitlines()
    assert lines[0] == "### single: 1 × 128 in, 128 out"
    assert lines[4] == "| peer | – | 5.00 | – | 100 | 0.50× | 1 of 2 |"
    assert lines[5] == "| hotswap | – | 11.0 (10.0–12.0) | – | 100 (100–100) | – | 2 |"
    assert lines[6].startswith("| broken | – failed: It fell over | – |") and lines[6].endswith("| 0 of 1 |")
    assert "1 runs beside neighbours that used over 0.25 core are left out. 1 engines' turns failed." in text


def test_the_json_holds_every_run_and_the_medians():
    from benchmarks.cpu.table import as_json

    found = as_json([run("hotswap", 1, 10), run("hotswap", 2, 12), run("hotswap", 3, 50, others=0.3)])
    assert found["summary"]["single"]["hotswap"]["tpot_p50_ms"] == {"median": 11, "low": 10, "high": 12, "count": 2}
    assert [one["disturbed"] for one in found["runs"]] == [False, False, True]


def test_the_line_of_a_run_marks_what_is_left_out():
    from benchmarks.cpu.table import shown_run

    assert shown_run(run("peer", 1, 5, others=0.3)).startswith("!  1 peer")
    assert shown_run(run("peer", 1, 5)).startswith("   1 peer")
