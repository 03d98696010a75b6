"""Keys: what each may do, whose tenant it is, and what the refused are told."""

import hashlib
from typing import Any

import httpx
import pytest

from m1serve.api.keys import KeyRing, Scope
from m1serve.config import KeySettings, ServeSettings
from m1serve.errors import RequestError

BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
ASKS: dict[Scope, tuple[str, str, Any]] = {
    Scope.INFER: ("POST", "/v1/chat/completions", BODY),
    Scope.FEEDBACK: ("POST", "/v1/feedback", {"session_id": "s", "value": 1}),
    Scope.READ: ("GET", "/v1/sessions/s", None),
}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key(name: str, *scopes: str, tenant: str | None = None) -> dict[str, Any]:
    return {"sha256": digest(name), "scopes": scopes, "tenant": tenant}


async def asked(world: Any, scope: Scope, name: str) -> httpx.Response:
    method, path, body = ASKS[scope]
    async with httpx.AsyncClient(verify=False, base_url=world.url) as http:
        headers = {"authorization": f"Bearer {name}"}
        return await http.request(method, path, json=body, headers=headers)


@pytest.mark.parametrize("scope", list(ASKS))
async def test_a_key_may_do_what_its_scopes_say_and_nothing_else(serve: Any, scope: Scope) -> None:
    async with serve(serve={"keys": [key("k", scope)]}) as world:
        for other in ASKS:
            answer = await asked(world, other, "k")
            if other is scope:
                # no ledger behind this server: reading gets past the key and no further
                assert answer.status_code == (503 if scope is Scope.READ else 200)
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "insufficient_scope")
            assert set(error) == {"message", "type", "param", "code"}
            assert f"this key may {scope}, wanted {other}" in error["message"]
            assert answer.headers["x-should-retry"] == "false"


async def test_an_unknown_key_is_401_whatever_it_asks(serve: Any) -> None:
    async with serve(serve={"keys": [key("k", "infer")]}) as world:
        for scope in ASKS:
            answer = await asked(world, scope, "other")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_plain_keys_have_every_scope_but_admin(serve: Any) -> None:
    async with serve(serve={"api_keys": [digest("plain")]}) as world:
        statuses = [(await asked(world, scope, "plain")).status_code for scope in ASKS]
    assert statuses == [200, 200, 503]


async def test_keys_of_one_tenant_share_it_and_sessions_are_inferred_by_key(serve: Any) -> None:
    keys = [key("a", "infer", tenant="acme"), key("b", "infer", tenant="acme"), key("c", "infer")]
    more = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More"}]
    follow_up = {**BODY, "messages": [*BODY["messages"], *more]}  # type: ignore[misc]
    async with serve(serve={"keys": keys}) as world:
        for name in "abc":
            await asked(world, Scope.INFER, name)
        async with httpx.AsyncClient(verify=False, base_url=world.url) as http:
            headers = {"authorization": "Bearer b"}
            await http.post("/v1/chat/completions", json=follow_up, headers=headers)
        a, b, c, after = world.turns
    assert (a.tenant_id, b.tenant_id) == ("acme", "acme")
    assert c.tenant_id == c.key_id == digest("c")[:12]
    assert a.key_id != b.key_id
    assert after.session_id == b.session_id


def test_the_admin_port_takes_the_admin_key_and_keys_with_the_scope() -> None:
    serve = ServeSettings(
        api_keys=(digest("plain"),),
        admin_key=digest("root"),
        keys=(KeySettings(sha256=digest("ops"), scopes=("admin",), tenant="acme"),),
    )
    ring = KeyRing.of_admins(serve)
    assert ring.caller("Bearer root", Scope.ADMIN).key_id == digest("root")[:12]
    assert ring.caller("bearer ops", Scope.ADMIN).tenant_id == "acme"
    for name, status in (("plain", 403), ("nobody", 401), ("", 401)):
        with pytest.raises(RequestError) as caught:
            ring.caller(f"Bearer {name}", Scope.ADMIN)
        assert caught.value.status == status


def test_no_admin_among_the_keys_leaves_the_admin_port_open_as_ever() -> None:
    ring = KeyRing.of_admins(ServeSettings(api_keys=(digest("plain"),)))
    assert ring.caller(None, Scope.ADMIN).tenant_id == "default"


@pytest.mark.parametrize("header", ["Bearer \ud800", "Bearer", "Basic k", "k", "Bearer  "])
def test_any_header_is_answered(header: str) -> None:
    ring = KeyRing.of_users(ServeSettings(api_keys=(digest("k"),)))
    with pytest.raises(RequestError, match="send a valid one"):
        ring.caller(header)
