"""Who may exchange parts, and how the server answers."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest
from click.testing import CliRunner

from hotswap.core.config.changes import Difference
from hotswap.core.config.schema import ServerSection
from hotswap.core.engine.exchange import Report
from hotswap.core.engine.switch import Effect
from hotswap.core.errors import (
    ConfigError,
    EngineStoppedError,
    ExchangeError,
    ExchangeUnderWayError,
    LoopTimeoutError,
)
from hotswap.server.app import create_app
from hotswap.server.commands.exchange import command
from hotswap.server.served import Served

KEY = "key-of-the-admin"
REPORT = Report(
    "", (Difference("scheduler", "scheduler", "scheduler:a", "scheduler:b", {}),), Effect(0.0123, 3, 2), True, ("so",))


class NoTokenizer:
    special_ids = frozenset()

    def encode_without_special_parsing(self, text):
        return [0]

    def decode(self, token_ids, skip_special_tokens=True):
        return ""


class Desk:
    """A server whose exchange answers as told."""

    def __init__(self, **settings):
        self.asked, self.answer = [], [REPORT]
        served = Served("m", None, NoTokenizer(), 1, 1, exchange=self.exchange)
        app = create_app(served, ServerSection(**{"admin_key": KEY, **settings}))
        self.api = app.state.api
        self.app = app

    def exchange(self, sets, replica):
        self.asked.append((sets, replica))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def post(self, body=None, path="/admin/components", **headers):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, json=body or {"set": ["scheduler=b"]}, headers=headers)


def bearer(key=KEY):
    return {"Authorization": f"Bearer {key}"}


def run(awaitable):
    import asyncio

    return asyncio.run(awaitable)


def test_without_an_admin_key_there_is_no_such_path():
    answer = run(Desk(admin_key=None).post(**bearer()))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("headers", [
    {}, bearer("wrong"), bearer("client"), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, bearer("")])
def test_only_the_admin_key_opens_it(headers):
    desk = Desk(api_keys=["client"])
    answer = run(desk.post(**headers))
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "invalid_admin_key"
    assert not desk.asked


def test_the_admin_key_opens_nothing_else():
    assert run(Desk(api_keys=["client"]).post(path="/tokenize", **bearer())).status_code == 401


def test_what_was_exchanged_is_answered():
    desk = Desk()
    answer = run(desk.post({"set": ["scheduler=b", "kvcache=c"], "replica": "1"}, **bearer()))
    assert answer.status_code == 200
    assert desk.asked == [(["scheduler=b", "kvcache=c"], "1")]
    assert answer.json() == {"object": "exchange", "engines": [REPORT.plain()]}
    assert REPORT.plain()["pause_ms"] == 12.3


@pytest.mark.parametrize(("error", "status", "code", "param"), [
    (ConfigError("no", "scheduler.policy"), 400, "exchange_refused", "scheduler.policy"),
    (ExchangeError("it broke", [Report("0", ())]), 409, "exchange_failed", None),
    (ExchangeUnderWayError("another is under way"), 409, "exchange_under_way", None),
    (EngineStoppedError("gone"), 503, "draining", None),
    (LoopTimeoutError("late", begun=True), 503, "unavailable", None),
])
def test_errors_have_openai_s_body(error, status, code, param):
    desk = Desk()
    desk.answer = error
    answer = run(desk.post(**bearer()))
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    if status != 503:
        assert answer.json()["error"]["code"] == code
        assert str(error) in answer.json()["error"]["message"]
    if code == "exchange_failed":
        assert "Engine '0' has exchanged its parts before." in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [
    {"set": []}, {"set": "scheduler=b"}, {"set": [1]}, {"set": ["a=b"], "more": 1}, {"replica": "0"}, {"set": ["x"]}])
def test_a_body_that_is_none_is_refused(body):
    desk = Desk()
    assert run(desk.post(body, **bearer())).status_code == 400
    assert not desk.asked


@pytest.mark.parametrize("entry", ["nope", "=continuous", " =x", ""])
def test_an_entry_that_assigns_nothing_is_named_by_its_field_and_quoted(entry):
    desk = Desk()
    answer = run(desk.post({"set": ["kvcache=radix", entry]}, **bearer()))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "set.1"
    assert error["message"].startswith("set.1: should be KEY=VALUE, such as 'scheduler=continuous', got ")
    assert error["message"].endswith(f'"{entry}"')
    assert not desk.asked


def test_a_server_that_drains_exchanges_nothing():
    desk = Desk()
    desk.api.draining = True
    assert run(desk.post(**bearer())).status_code == 503


@pytest.fixture
def answers(monkeypatch):
    """What the command's server answers; ``asked`` is what it was asked."""
    box = {"status": 200, "body": {"engines": [REPORT.plain()]}, "asked": []}

    def post(url, key, body):
        box["asked"].append((url, key, body))
        return box["status"], box["body"]

    monkeypatch.setattr("hotswap.server.commands.exchange._post", post)
    return box


def test_the_command_tells_what_has_happened(answers, tmp_path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    result = CliRunner().invoke(
        command, ["--url", "http://h:1/", "--key-file", str(tmp_path / "key"), "--replica", "1", "scheduler=b"])
    assert result.exit_code == 0, result.output
    assert answers["asked"] == [
        ("http://h:1/admin/components", KEY, {"set": ["scheduler=b"], "replica": "1"})]
    assert result.output.splitlines() == [
        "scheduler: scheduler:a -> scheduler:b",
        "pause 12.3 ms; 3 requests handed over, 2 computed again; the new parts have come through their first steps",
        "note: so"]


@pytest.mark.parametrize(("status", "code"), [(400, 2), (403, 2), (404, 2), (409, 1), (503, 1)])
def test_the_command_ends_with_a_code_that_says_who_was_wrong(answers, status, code):
    answers.update(status=status, body={"error": {"message": "because"}})
    result = CliRunner().invoke(command, ["--url", "http://h", "--key", "k", "scheduler=b"])
    assert result.exit_code == code
    assert result.output == "hotswap: because\n"


def test_the_command_says_that_the_server_takes_no_exchanges_whichever_way_the_server_refuses_the_path(answers):
    for settings, status in (({}, 404), ({"api_keys": ["client"]}, 401)):
        refusal = run(Desk(admin_key=None, **settings).post(**bearer()))
        assert refusal.status_code == status
        answers.update(status=status, body=refusal.json())
        result = CliRunner().invoke(command, ["--url", "http://h", "--key", "k", "scheduler=b"])
        assert (result.exit_code, result.output) == (
            2, "hotswap: this server takes no exchanges: it has no server.admin_key; start it with one\n")


@pytest.mark.parametrize("place", ["of --key", "on stdin", "in FILE"])
def test_the_command_says_where_the_wrong_key_came_from_and_not_the_key(answers, place, tmp_path):
    file = tmp_path / "admin.key"
    file.write_text("wrong-key\n")
    given = {"of --key": ["--key", "wrong-key"], "on stdin": ["--key-file", "-"], "in FILE": ["--key-file", str(file)]}
    answers.update(status=403, body=run(Desk().post(**bearer("wrong-key"))).json())
    result = CliRunner().invoke(command, ["--url", "http://h", *given[place], "scheduler=b"], input="wrong-key\n")
    assert (result.exit_code, result.output) == (
        2, f"hotswap: the key {place.replace('FILE', str(file))} is not the server's admin key\n")


@pytest.mark.parametrize("arguments", [
    ["--url", "http://h", "scheduler=b"], ["--url", "http://h", "--key", "k"], ["--key", "k", "scheduler=b"],
    ["--url", "ftp://h", "--key", "k", "scheduler=b"], ["--url", "http://h", "--key-file", "/no/such", "a=b"],
    ["--url", "http://h", "--key", "k", "--key-file", "f", "a=b"]])
def test_the_command_says_what_it_needs(arguments):
    assert CliRunner().invoke(command, arguments).exit_code == 2


def test_a_server_that_is_not_there_is_named():
    result = CliRunner().invoke(command, ["--url", "http://127.0.0.1:9", "--key", "k", "scheduler=b"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9/admin/components does not answer" in result.output


class Elsewhere:
    """A server that answers every request as told, and keeps what it was asked."""

    def __init__(self, status=200, body=b"{}", **headers):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append((self.path, self.headers.get("Authorization")))
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *arguments):
                """Not into the test's output."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_does_not_follow_a_redirect(status):
    with Elsewhere() as other, Elsewhere(status, Location=f"{other.url}/x") as server:
        result = CliRunner().invoke(command, ["--url", server.url, "--key", KEY, "scheduler=b"])
    assert result.exit_code == 1
    assert len(server.asked) == 1
    assert not other.asked
    assert "redirect" in result.output


@pytest.mark.parametrize("content", [b"the-secret\nand-more\n", b"the-secret\xff", "the-secret\u00e9".encode(), b"\n"])
def test_a_key_file_that_holds_no_key_is_refused_and_not_shown(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    result = CliRunner().invoke(
        command, ["--url", "http://127.0.0.1:9", "--key-file", str(tmp_path / "key"), "scheduler=b"])
    assert result.exit_code == 2, result.output
    assert "the-secret" not in result.output
    assert "and-more" not in result.output


@pytest.mark.parametrize(("status", "body", "said"), [
    (200, b"[]", "is no hotswap server"), (200, b"hello", "hello"), (200, b'{"engines": 1}', "is no hotswap server"),
    (502, b'{"error": "bad gateway"}', "bad gateway"), (502, b'["x"]', "x"), (502, b"", "502")])
def test_what_no_hotswap_server_would_answer_is_told_and_not_stumbled_over(status, body, said):
    with Elsewhere(status, body) as server:
        result = CliRunner().invoke(command, ["--url", server.url, "--key", KEY, "scheduler=b"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert said in result.output
