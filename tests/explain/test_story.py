"""What happened to a request, step by step."""

import pytest

from hotswap.lab.decisions.lives import lives
from hotswap.lab.decisions.overview import overview
from hotswap.lab.decisions.story import NOT_LOOKED_AT, chapters


def told(log, request):
    return [(chapter.what, chapter.text) for chapter in chapters(log, request)]


def test_a_request_alone_arrives_starts_computes_has_a_token_decodes_and_ends(record):
    recording = record()
    recording.rig.add("r", list(range(11)), 5, priority=2)
    recording.rig.run()
    log = recording.stop()
    assert told(log, "r") == [
        ("says", "arrives with 11 prompt tokens, for at most 5 new ones, priority 2; 0 run, 0 wait"),
        ("says", "starts with nothing in the cache"),
        ("computes", ""), ("says", "has its first token"), ("decodes", ""),
        ("says", "ends (length) with 5 tokens"),
    ]
    computes, decodes = (chapter for chapter in chapters(log, "r") if chapter.what in ("computes", "decodes"))
    assert (computes.n_steps, computes.tokens, computes.kept) == (1, 11, 1)
    assert (decodes.n_steps, decodes.tokens, decodes.kept, decodes.steps) == (4, 4, 3, (2, 5))


def test_reused_tokens_a_long_prompt_in_chunks_and_the_tokens_of_others_are_told(record):
    recording = record(num_pages=100, max_batch_tokens=16)
    recording.rig.add("first", [3] * 40, 1)
    recording.rig.run()
    recording.rig.add("again", [3] * 40 + [5] * 24, 4)
    recording.rig.add("other", [9] * 5, 9)
    recording.rig.run()
    found = list(chapters(recording.stop(), "again"))
    assert "starts with 40 tokens that are there already" in [chapter.text for chapter in found]
    computes = next(chapter for chapter in found if chapter.what == "computes")
    assert (computes.n_steps, computes.tokens) == (2, 24)
    assert computes.others[1] > 0


def test_a_request_behind_others_says_what_it_waits_for_and_what_was_done_meanwhile(record):
    recording = record(max_running=1)
    recording.rig.add("a", [1] * 9, 10)
    recording.rig.add("b", [2] * 9, 3)
    recording.rig.run()
    waits = [chapter for chapter in chapters(recording.stop(), "b") if chapter.what == "waits"]
    [chapter] = waits
    assert (chapter.text, chapter.plans, chapter.others) == (NOT_LOOKED_AT, 10, (10, 18))
    assert chapter.end - chapter.begin == pytest.approx(0.010)


def test_one_that_lets_another_compute_its_prefix_says_whom_and_the_overview_says_how_long_all_did(record):
    recording = record(num_pages=1 + 100)
    recording.rig.add("first", [3] * 70 + [1], 2)
    for name in ("second", "third"):
        recording.rig.add(name, [3] * 70 + [2], 2)
    recording.rig.run()
    log = recording.stop()
    [waits, starts] = list(chapters(log, "second"))[1:3]
    assert (waits.what, waits.text) == ("waits", "its prefix is being computed by first")
    assert (waits.plans, waits.others) == (3, (3, 71)), "in chunks of 24, 24 and 23 tokens"
    assert starts.text == "starts with 68 tokens that are there already"
    assert overview(log).held["its prefix is being computed by another"] == pytest.approx(2 * (waits.end - waits.begin))


def test_suspensions_name_who_made_room_for_whom(record):
    recording = record().traffic()
    log = recording.stop()
    victims = [life.id for life in lives(log) if life.preemptions]
    assert victims
    for victim in victims:
        texts = [text for _, text in told(log, victim)]
        suspended = [text for text in texts if text.startswith("is suspended (recompute): makes room for ")]
        assert len(suspended) == recording.witness.ended[victim].preemptions
        assert sum(text.startswith("starts again with ") for text in texts) <= len(suspended)
        beneficiary = suspended[0].rpartition(" ")[2]
        assert f"{victim} is suspended (recompute): makes room for {beneficiary}" in [
            text for _, text in told(log, beneficiary)]


def test_what_is_told_of_a_request_is_in_order_and_within_its_life(record):
    log = record(depth=2, lookahead=2).traffic(forks=True).stop()
    found = list(lives(log))
    assert len(found) > 30
    for life in found:
        times = [chapter.begin for chapter in chapters(log, life.id)]
        assert times[0] == life.arrived and times[-1] == life.ended
        assert times == sorted(times)
        drafts = sum(chapter.drafted for chapter in chapters(log, life.id))
        assert drafts >= 0


def test_kept_tokens_of_the_chapters_are_those_of_the_request(record):
    log = record().traffic().stop()
    for life in lives(log):
        kept = sum(chapter.kept for chapter in chapters(log, life.id))
        assert life.output_length - kept in (0, 1), "the last token comes in the step behind which it has ended"
