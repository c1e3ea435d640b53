"""Channels: typed frames between peers that know a secret; whoever does not is hung up on and harms nothing."""

import math
import socket
import struct
import threading

import pytest

from hotswap.core.execution import channel as module
from hotswap.core.execution.channel import (
    MAX_FRAME_BYTES,
    Channel,
    ChannelClosedError,
    Kind,
    Listener,
    connect,
    decode,
    encode,
    encode_message,
)
from hotswap.core.interfaces.kvcache import Grant, GroupGrant
from hotswap.core.interfaces.messages import NewRequest, Resume, RowVerdict, StepMessage, Suspended, Verdict
from hotswap.core.interfaces.scheduler import Row, SuspendMode
from hotswap.core.request import SamplingParams, TokenLogprob


@pytest.fixture(params=["unix", "tcp"])
def listener(request, tmp_path, secret):
    made = Listener(secret, path=tmp_path / "s") if request.param == "unix" else Listener(secret, host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def admitted(listener):
    """The result of admitting one peer, in a thread: call it to wait."""
    box = {}

    def admit():
        try:
            box["value"] = listener.admit(listener.accept(10))
        except ChannelClosedError as error:
            box["error"] = error

    thread = threading.Thread(target=admit)
    thread.start()

    def result():
        thread.join(10)
        assert not thread.is_alive()
        if "error" in box:
            raise box["error"]
        return box["value"]

    yield result
    thread.join(10)


def test_peers_that_know_the_secret_exchange_frames_in_order(listener, admitted, secret):
    worker = connect(listener.address, secret, 7)
    engine, number = admitted()
    assert number == 7
    payloads = [b"", b"x", bytes(1_000_000)]
    thread = threading.Thread(target=lambda: [worker.send(Kind.DONE, payload) for payload in payloads])
    thread.start()
    assert [engine.receive() for _ in payloads] == [(Kind.DONE, payload) for payload in payloads]
    thread.join()
    engine.send(Kind.STOP)
    assert worker.receive().kind is Kind.STOP
    engine.close()
    with pytest.raises(ChannelClosedError, match="hung up"):
        worker.receive()
    worker.close()


def test_a_worker_with_another_secret_is_hung_up_on_and_both_are_told(listener, admitted, secret):
    with pytest.raises(ChannelClosedError):
        connect(listener.address, bytes(32), 0)
    with pytest.raises(ChannelClosedError, match="does not know the secret"):
        admitted()


def test_a_worker_does_not_trust_an_engine_without_the_secret(listener, admitted, secret, monkeypatch):
    impostor = threading.current_thread()
    real = module.hmac.compare_digest
    monkeypatch.setattr(  # an impostor lets everybody in
        module.hmac, "compare_digest", lambda a, b: threading.current_thread() is not impostor or real(a, b))
    monkeypatch.setattr(listener, "_secret", bytes(32))
    with pytest.raises(ChannelClosedError, match="does not know the secret"):
        connect(listener.address, secret, 0)
    admitted()[0].close()


def test_a_proof_that_was_overheard_cannot_be_used_again(listener, admitted, secret, monkeypatch):
    """The same hello against another nonce of the engine's is refused."""
    heard = {}
    monkeypatch.setattr(module, "_proof", lambda *a, real=module._proof: heard.setdefault("proof", real(*a)))
    worker = connect(listener.address, secret, 0)
    admitted()[0].close()
    worker.close()
    monkeypatch.undo()
    kind, _, place = listener.address.partition(":")
    again = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    host, _, port = place.rpartition(":")
    again.connect(place if kind == "unix" else (host, int(port)))
    connection = listener.accept(10)
    again.sendall(struct.pack("<I", 0) + bytes(32) + heard["proof"])
    with pytest.raises(ChannelClosedError, match="does not know the secret"):
        listener.admit(connection)
    again.close()


def test_a_peer_that_says_nothing_is_given_up(listener, monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.2)
    kind, _, place = listener.address.partition(":")
    silent = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    host, _, port = place.rpartition(":")
    silent.connect(place if kind == "unix" else (host, int(port)))
    with pytest.raises(ChannelClosedError):
        listener.admit(listener.accept(10))
    silent.close()


def stranger(listener):
    """A connection that says nothing."""
    kind, _, place = listener.address.partition(":")
    made = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    host, _, port = place.rpartition(":")
    made.settimeout(5)
    made.connect(place if kind == "unix" else (host, int(port)))
    return made


def test_a_peer_that_sends_a_byte_now_and_then_is_given_up_when_the_time_of_all_is_over(listener, monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.5)
    slow, over = stranger(listener), threading.Event()
    sent = []

    def trickle():
        while len(sent) < 60 and not over.wait(0.1):
            try:
                slow.sendall(b"x")
            except OSError:
                return
            sent.append(1)

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(ChannelClosedError):
            listener.admit(listener.accept(10))
    finally:
        over.set()
        thread.join(10)
        slow.close()
    assert 1 < len(sent) < 30


def test_strangers_beyond_a_few_are_hung_up_on_and_make_room_for_ours_when_they_are_given_up(
    listener, secret, monkeypatch,
):
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.2)
    silent = [stranger(listener) for _ in range(module.STRANGERS + 1)]
    taken = [listener.accept(10) for _ in silent[1:]]
    with pytest.raises(TimeoutError, match="have not proven"):
        listener.accept(0.1)
    assert len(silent[-1].recv(1)) == 0
    with pytest.raises(ChannelClosedError):
        listener.admit(taken.pop())
    ours = {}
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 10.0)
    thread = threading.Thread(target=lambda: ours.update(worker=connect(listener.address, secret, 3)))
    thread.start()
    channel, number = listener.admit(listener.accept(10))
    thread.join(10)
    assert number == 3
    for one in (*silent, *taken, channel, ours["worker"]):
        one.close()


def test_the_socket_is_for_its_owner_alone_and_is_gone_afterwards(tmp_path, secret):
    made = Listener(secret, path=tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    made.close()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("header", [
    struct.pack("<IB", MAX_FRAME_BYTES + 1, Kind.VERDICT), struct.pack("<IB", 4, 99), b"\x00"])
def test_what_is_no_frame_ends_the_channel_before_anything_is_read(header):
    ours, theirs = socket.socketpair()
    theirs.sendall(header)
    theirs.close()
    with pytest.raises(ChannelClosedError):
        Channel(ours).receive()
    ours.close()


def test_a_channel_is_readable_once_something_came_or_nothing_more_can_come():
    ours, theirs = map(Channel, socket.socketpair())
    assert not ours.readable(0)
    theirs.send(Kind.DONE)
    assert ours.readable(10) and ours.receive().kind is Kind.DONE
    assert not ours.readable(0.001)
    theirs.close()
    assert ours.readable(10)
    ours.close()
    assert ours.readable(10)


def test_a_frame_that_is_too_long_is_not_sent():
    ours, theirs = socket.socketpair()
    with pytest.raises(ValueError, match="longer than the limit"):
        Channel(ours).send(Kind.DONE, bytes(MAX_FRAME_BYTES + 1))
    ours.close()
    theirs.close()


def test_a_message_that_does_not_end_keeps_no_other_waiting_for_ever():
    """A rank was stopped in its tracks: its socket is full, and the engine's thread stands in a send."""
    ours, theirs = socket.socketpair()
    channel, errors = Channel(ours), []

    def flood():
        try:
            channel.send(Kind.EXECUTE, bytes(10_000_000))
        except ChannelClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=flood)
    thread.start()
    theirs.recv(1, socket.MSG_PEEK)
    channel.set_timeout(0.1)
    with pytest.raises(ChannelClosedError, match="reads nothing"):
        channel.send(Kind.STOP)
    channel.close()
    theirs.close()
    thread.join(10)
    assert not thread.is_alive() and errors


def message():
    sampling = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, seed=2**62, extra={"p": {"x": [1, "a"]}})
    return StepMessage(
        9, [Row("a", 3, 2)], [("b", SuspendMode.SWAP)], ["c"],
        [NewRequest("a", [1, 2, 3], 2, sampling, 2**63 - 1, frozenset({1, 5}), ((1, 2), (3,)))], [Resume("a", 1)],
        [("a", Grant({"full": GroupGrant(0, (4, 5), 1, ((1, 4),))}, None))], [("d", [7, 8])], {"opaque": [1, 2]})


def test_a_message_arrives_as_it_was_sent():
    sent = message()
    assert decode(StepMessage, encode_message(sent)) == sent


def test_what_undoes_a_grant_on_the_host_does_not_travel():
    sent = message()
    request, grant = sent.grants[0]
    sent.grants[0] = request, grant._replace(entry=object())
    assert decode(StepMessage, encode_message(sent)) == message()
    assert sent.grants[0][1].entry is not None


def test_a_verdict_arrives_as_it_was_sent_minus_infinity_included():
    top = ((5, -0.25), (6, -math.inf))
    row = RowVerdict("a", [5, 6], 12, 3, 1, 0, [TokenLogprob(5, -math.inf, 1, top)], [TokenLogprob(1, -2.5, 3)], 4, "e")
    sent = Verdict(3, [row], [Suspended("b", {"full": 4}, True)], durations={"forward": 0.25}, error="x")
    received = decode(Verdict, encode(sent))
    assert received == sent
    assert isinstance(received.rows[0].logprobs[0], TokenLogprob)


@pytest.mark.parametrize("payload", [
    b"", b"[]", b'{"step_id": "one"}', b'{"step_id": 1, "rows": [["a"]]}', b"\x80\x04."])
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(ChannelClosedError, match="StepMessage"):
        decode(StepMessage, payload)
