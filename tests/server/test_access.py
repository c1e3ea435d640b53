"""Who may ask, who shares what with whom, and what the server tells about itself."""

import httpx
import pytest

from hotswap.core.engine.drafts import DraftCounts
from hotswap.core.interfaces.deployment import Loads
from hotswap.core.interfaces.messages import RowVerdict, Verdict


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(start):
    return start(api_keys={"key-a": "alice", "key-b": "bob"})


def test_without_a_valid_key_nothing_but_probes_is_answered(guarded):
    for headers in (
        {}, bearer("wrong"), bearer("key-a key-b"), {"Authorization": "key-a"}, {"Authorization": "Basic key-a"},
        bearer("kéy".encode().decode("latin-1")),
    ):
        for path in ("/v1/models", "/server_info", "/version", "/nothing", "/openapi.json"):
            answer = guarded.client.get(path, headers={k: v.encode("latin-1") for k, v in headers.items()})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.get("/ready").status_code == 200
    assert guarded.client.get("/v1/models", headers=bearer("key-b")).status_code == 200


def test_the_tenant_comes_from_the_key(guarded, engine):
    for key in ("key-a", "key-b"):
        guarded.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **bearer(key))
    assert [request.tenant for request in engine.requests] == ["alice", "bob"]


def cached(server, headers=None, **fields):
    body = {"prompt": "a prompt that is shared", "max_tokens": 1, **fields}
    answer = server.client.post("/v1/completions", json=body, headers=headers or {})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_several_tenants_share_no_cached_prefix(guarded):
    assert cached(guarded, bearer("key-a")) == 0
    assert cached(guarded, bearer("key-a")) > 0
    assert cached(guarded, bearer("key-b")) == 0
    assert cached(guarded, bearer("key-b")) > 0


def test_a_salt_separates_cached_prefixes(server):
    assert cached(server, cache_salt="s1") == 0
    assert cached(server, cache_salt="s1") > 0
    assert cached(server, cache_salt="s2") == 0
    assert cached(server) == 0


def test_one_key_is_one_tenant_and_shares(start):
    server = start(api_keys=["only"])
    assert cached(server, bearer("only")) == 0
    assert cached(server, bearer("only")) > 0


def test_no_cors_headers_by_default(server):
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        answer = server.client.request(method, "/v1/models", headers=headers)
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert answer.status_code == 405


def test_only_listed_origins_get_cors_headers(start):
    server = start(cors_origins=["https://good.example"], api_keys=["k"])
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    good = server.client.options("/v1/completions", headers={"Origin": "https://good.example", **preflight})
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-credentials" not in good.headers
    evil = server.client.options("/v1/completions", headers={"Origin": "https://evil.example", **preflight})
    assert "access-control-allow-origin" not in evil.headers


def test_images_are_never_fetched(server):
    """SSRF: no URL in a message is looked at."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        port = listener.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/", f"http://0x7f000001:{port}/", "file:///etc/passwd"):
            part = {"type": "image_url", "image_url": {"url": url}}
            assert server.chat([part]).status_code == 400
        with pytest.raises(TimeoutError):
            listener.accept()


# What it tells about itself


def test_health_tells_whether_work_gets_done(server, engine):
    assert server.client.get("/health").json() == {"status": "ok"}
    engine.problem = "no step was finished for 61 s; see /var/lib/engine/log"
    for path in ("/health", "/ready"):
        answer = server.client.get(path)
        assert answer.status_code == 503
        assert "no step was finished for 61 s" in answer.json()["error"]["message"]
        assert "/var" not in answer.json()["error"]["message"]


def test_models_lists_the_one_that_is_served(server):
    listed = server.client.get("/v1/models").json()
    assert [(m["id"], m["object"], m["max_model_len"]) for m in listed["data"]] == [("tiny", "model", 512)]
    assert server.client.get("/v1/models/tiny").json() == listed["data"][0]


def test_names_with_slashes_can_be_asked_for(start):
    server = start(served={"name": "owner/name"})
    assert server.client.get("/v1/models/owner/name").json()["id"] == "owner/name"


def test_server_info_shows_components_and_effective_defaults(start):
    server = start(served={
        "sampling_defaults": {"temperature": 0.2}, "describe": lambda: {"components": [{"kind": "scheduler"}]}})
    info = server.client.get("/server_info").json()
    assert info["sampling_defaults"]["temperature"] == 0.2
    assert info["sampling_defaults"]["top_p"] == 1.0
    assert info["components"] == [{"kind": "scheduler"}]
    assert info["loads"] == {"running": 0, "waiting": 0, "kv_usage": 0.0}


def test_server_info_tells_how_drafts_fare(start, engine, monkeypatch):
    fates = DraftCounts()
    row = RowVerdict("a", [5, 6], 9, drafted=3, accepted=1)
    fates.add(Verdict(1, [row], durations={"propose": 0.5, "forward": 2.0}))
    monkeypatch.setattr(engine, "loads", lambda: Loads(1, 0, 0.5, extra={"speculation": fates.report()}))
    told = start().client.get("/server_info").json()["loads"]["speculation"]
    assert told == {
        "rows": 1, "drafted": 3, "accepted": 1, "acceptance_rate": pytest.approx(1 / 3),
        "acceptance_rate_by_position": [1.0, 0.0, 0.0], "acceptance_length": 2.0, "dropped_proposals": 0,
        "draft_seconds": 0.5, "verify_seconds": 2.0}


def test_text_to_tokens_and_back(server, engine):
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == engine.tokenizer.encode("hé")
    assert (answer["count"], answer["max_model_len"]) == (3, 512)
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    assert server.post("/detokenize", {"tokens": [999]}).status_code == 400
    assert server.post("/detokenize", {"tokens": ["a"]}).status_code == 400
    assert server.post("/detokenize", {"tokens": [5] * 513}).status_code == 400
    assert server.post("/tokenize", {"prompt": 3}).status_code == 400


def test_a_chat_has_as_many_tokens_as_its_usage_says(server):
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == count


def test_the_prefix_cache_can_be_reset(server, engine):
    assert server.post("/reset_prefix_cache").json() == {"pages_dropped": 7}
    refused = httpx.post(f"{server.url}/reset_prefix_cache", headers={"Origin": "https://evil.example"})
    assert refused.status_code == 403
    assert refused.json()["error"]["message"]
    assert engine.resets == 1


def test_the_api_describes_itself(server):
    described = server.client.get("/openapi.json").json()
    schema = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "min_p", "max_completion_tokens", "priority"} <= schema["properties"].keys()
    assert "sooner" in schema["properties"]["priority"]["description"]
    assert server.client.get("/docs").status_code == 404
    assert httpx.get(f"{server.url}/version").json()["version"]
