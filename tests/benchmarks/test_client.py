"""The client of the servers that are measured: what comes when, and what is no answer."""

import contextlib
import socket
import threading
import time

import pytest

from hotswap.core.interfaces.workload import WorkItem

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'


def text(text, finish="null"):
    return b'data: {"choices": [{"text": "%b", "finish_reason": %b}]}\n\n' % (text.encode(), finish.encode())


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def answered():
    """``answered(pieces, …)``: the records of as many requests, each answered by the next list of pieces."""
    from benchmarks.cpu.client import exchange, records, request

    with socket.create_server(("127.0.0.1", 0)) as listener:
        seen, threads = [], []

        def answer(connection, pieces):
            with connection, contextlib.suppress(ConnectionError):
                seen.append(connection.recv(1 << 16))
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.02)

        def ask(*answers, streams=1, limit=10.0):
            def serve():
                for pieces in answers:
                    threads.append(threading.Thread(
                        target=answer, args=(listener.accept()[0], pieces), daemon=True))
                    threads[-1].start()

            threads.append(threading.Thread(target=serve, daemon=True))
            threads[-1].start()
            sent = [request("/v1/completions", {"prompt": [number]}) for number in range(len(answers))]
            heard = exchange(listener.getsockname()[1], sent, streams, time.perf_counter, limit)
            assert sorted(seen) == sorted(sent)
            return records([WorkItem((1, 2), 3)] * len(answers), heard)

        yield ask
        for thread in threads:
            thread.join(10)


def read(*pieces):
    """The record of a request that was answered by these pieces, one a second."""
    from benchmarks.cpu.client import Heard, records

    heard = Heard(0.0, [(float(second), piece) for second, piece in enumerate(pieces)], float(len(pieces)))
    record, = records([WorkItem((1, 2), 3)], [heard])
    return record


END = chunk(text("", '"length"') + USAGE) + b"0\r\n\r\n"


def test_a_delivery_came_when_its_last_byte_did():
    stream = HEAD + chunk(text("a")) + chunk(text("b") + text("c")) + END
    cut = stream.index(b'"b"')
    record = read(stream[:cut], stream[cut : cut + 8], stream[cut + 8 :])
    assert record.chunks == ((0.0, 1), (2.0, 1), (2.0, 1))
    assert (record.output_tokens, record.ended, record.error) == (3, 3.0, None)


@pytest.mark.parametrize("extension", [b"", b";name=value"])
def test_an_event_in_several_chunks_came_with_the_last_of_them(extension):
    event = text("a")
    first = chunk(event[:9]).replace(b"\r\n", extension + b"\r\n", 1)
    record = read(HEAD + first[:1], first[1:], chunk(event[9:-1]) + chunk(event[-1:] + text("b")), END)
    assert record.error is None and [time for time, _ in record.chunks] == [2.0, 2.0]


def test_however_a_stream_is_cut_the_same_is_read():
    stream = HEAD + chunk(text("a")[:5]) + chunk(text("a")[5:] + text("b")) + END
    for cut in range(1, len(stream)):
        record = read(stream[:cut], stream[cut:])
        assert (len(record.chunks), record.output_tokens, record.error) == (2, 3, None), cut


def test_a_stream_without_chunks_is_read_as_it_is():
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    assert [time for time, _ in read(head + text("a"), text("b"), text("", '"stop"') + USAGE).chunks] == [0.0, 1.0]


def test_as_many_are_under_way_as_was_asked_and_each_answer_is_its_own(answered):
    streams = [[HEAD, chunk(text("x") * count), chunk(text("", '"stop"') + USAGE)] for count in (1, 2, 3, 4)]
    found = answered(*streams, streams=2)
    assert [len(record.chunks) for record in found] == [1, 2, 3, 4]
    first, second, third, _ = found
    assert second.sent < first.ended and min(first.ended, second.ended) <= third.sent


@pytest.mark.parametrize(("pieces", "words"), [
    ([b"HTTP/1.1 429 Too Many\r\n\r\nthe queue is full"], "no whole stream came, but: HTTP/1.1 429"),
    ([HEAD, chunk(text("a"))], "no whole stream came"),
    ([HEAD, chunk(text("a")), chunk(b'data: {"error": {"message": "lost"}}\n\n')], "lost"),
    ([], "no whole stream came"),
])
def test_what_is_no_whole_answer_is_an_error_and_says_what_came(answered, pieces, words):
    good, bad = answered([HEAD, chunk(text("a") + text("", '"stop"') + USAGE)], pieces)
    assert good.error is None and words in bad.error


def test_a_server_that_stands_still_is_given_up(answered):
    with pytest.raises(TimeoutError, match="1 requests have not ended within 0.05 s"):
        answered([HEAD] + [b"x"] * 20, limit=0.05)
