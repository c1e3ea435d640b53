"""What one call may ask of the host and the worker is bounded, whatever each of its fields may hold."""

import time


def test_long_lists_of_ids_for_many_sequences_are_refused_at_once(server):
    ids = [i % 250 for i in range(20_000)]
    begun = time.perf_counter()
    answer = server.complete(prompt=["x"] * 1000, allowed_token_ids=ids)
    assert time.perf_counter() - begun < 2
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allowed_token_ids"
    assert "20000 ids for each of 1000 sequences" in answer.json()["error"]["message"]
    assert server.engine.requests == []


def test_long_lists_of_ids_for_one_sequence_are_served(server):
    assert server.complete(prompt="x", max_tokens=1, allowed_token_ids=list(range(250)) * 80).status_code == 200
