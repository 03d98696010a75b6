"""Models, health, metrics, keys and request ids."""

import hashlib
import json
import re
from typing import Any

import httpx
import openai
import pytest

from m1serve.errors import EngineError

HI: Any = [{"role": "user", "content": "Hi"}]
KEYS = {"api_keys": [hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two")]}


async def test_models_are_listed_with_their_context_length(serve: Any) -> None:
    async with serve() as world:
        listed = [model async for model in world.client.models.list()]
        alias = await world.client.models.retrieve("m1/alias")
        with pytest.raises(openai.NotFoundError):
            await world.client.models.retrieve("other")
    assert [model.id for model in listed] == ["fake", "m1/alias"]
    assert listed[0].max_model_len == 4096
    assert (alias.id, alias.object, alias.owned_by) == ("m1/alias", "model", "m1serve")


async def test_an_alias_answers_under_its_own_name(serve: Any) -> None:
    async with serve() as world:
        answer = await world.client.chat.completions.create(model="m1/alias", messages=HI)
        assert world.turns[0].model_id == "fake"
    assert answer.model == "m1/alias"


async def test_health_says_when_the_engine_is_dead(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        alive = await http.get(f"{world.url}/health")
        world.engine.dead = EngineError("its thread is gone")
        dead = await http.get(f"{world.url}/health")
    assert (alive.status_code, alive.json()["weights_version"]) == (200, "fake@0")
    assert (dead.status_code, dead.json()["reason"]) == (503, "its thread is gone")


async def test_health_asks_a_distant_engine(serve: Any) -> None:
    async def refresh() -> None:
        raise EngineError("no replica can answer")

    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        world.engine.refresh = refresh
        answer = await http.get(f"{world.url}/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no replica can answer")


async def test_metrics_count_what_happened(serve: Any) -> None:
    async with serve("<think>\na\n</think>\nb") as world, httpx.AsyncClient(verify=False) as http:
        await world.client.chat.completions.create(model="fake", messages=HI)
        await http.get(f"{world.url}/nowhere")
        text = (await http.get(f"{world.url}/metrics")).text
    route = 'route="/v1/chat/completions",status="200"'
    assert f"m1serve_http_requests_total{{{route}}} 1.0" in text
    assert 'm1serve_http_requests_total{route="other",status="404"} 1.0' in text
    assert 'm1serve_turns_total{mode="train",stop="eos"} 1.0' in text
    assert "m1serve_engine_slots 8.0" in text


async def test_a_key_is_needed_where_keys_are_set(serve: Any) -> None:
    async with serve(key="two", serve=KEYS) as world:
        await world.client.chat.completions.create(model="fake", messages=HI)
        async with httpx.AsyncClient(verify=False) as http:
            for path in ("/v1/models", "/v1/models/fake"):
                assert (await http.get(world.url + path)).status_code == 401
            for path in ("/v1/chat/completions", "/v1/feedback", "/v1/sessions/s/end"):
                assert (await http.post(world.url + path)).status_code == 401
            assert (await http.get(f"{world.url}/health")).status_code == 200
    assert world.turns[0].key_id == hashlib.sha256(b"two").hexdigest()[:12]


async def test_a_wrong_key_is_refused_in_openais_words(serve: Any) -> None:
    async with serve(key="three", serve=KEYS) as world:
        with pytest.raises(openai.AuthenticationError) as caught:
            await world.client.chat.completions.create(model="fake", messages=HI)
    assert caught.value.code == "invalid_api_key"


async def test_tenants_do_not_share_histories(serve: Any) -> None:
    async with serve("<think>\nhm\n</think>\nHello.", key="one", serve=KEYS) as world:
        await world.client.chat.completions.create(model="fake", messages=HI)
        other = world.client.with_options(api_key="two")
        again: Any = [*HI, {"role": "assistant", "content": "Hello."}, *HI]
        await other.chat.completions.create(model="fake", messages=again)
        first, second = world.turns
        salts = {request.cache_salt for request in world.engine.requests}
    assert first.session_id != second.session_id
    assert "hm" not in world.tok.decode(second.prompt_ids)
    assert len(salts) == 2


async def test_every_response_has_its_own_request_id(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        answers = [await http.get(f"{world.url}/health") for _ in range(2)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2


async def test_the_openapi_page_knows_the_request(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        page = (await http.get(f"{world.url}/openapi.json")).json()
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        operation = page["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert field in schema["properties"]
        statuses = {"200", "400", "401", "403", "404", "413", "500", "503"}
        assert set(operation["responses"]) == statuses
    text = json.dumps(page)
    for reference in re.findall(r'"\$ref": "([^"]*)"', text):
        assert reference.removeprefix("#/components/schemas/") in page["components"]["schemas"]


async def test_what_is_not_here_is_told_in_openais_shape(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        for method, path, status in (
            ("POST", "/v1/embeddings", 404),
            ("POST", "/v1/responses", 404),
            ("GET", "/v1/responses/resp_1", 404),
            ("GET", "/", 404),
            ("GET", "/v1", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models/fake", 405),
            ("OPTIONS", "/v1/chat/completions", 405),
        ):
            answer = await http.request(method, world.url + path)
            assert (path, answer.status_code) == (path, status)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert path in error["message"]
            assert "access-control-allow-origin" not in answer.headers


PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-m1-session-id",
}


@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
async def test_pages_that_are_named_may_call(serve: Any, origins: list[str]) -> None:
    async with serve(serve={"cors_origins": origins}) as world:
        url = f"{world.url}/v1/chat/completions"
        async with httpx.AsyncClient(verify=False) as http:
            asked = await http.options(url, headers=PREFLIGHT)
            body = {"model": "fake", "messages": HI, "stream": True}
            answer = await http.post(url, json=body, headers={"origin": PAGE})
            refused = await http.post(url, json={}, headers={"origin": PAGE})
            other = await http.post(url, json=body, headers={"origin": "https://evil.example"})
    assert asked.status_code == 200
    assert "x-m1-session-id" in asked.headers["access-control-allow-headers"]
    assert refused.status_code == 400
    for allowed in (asked, answer, refused):
        assert allowed.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "x-m1-turn-id" in answer.headers["access-control-expose-headers"]
    assert ("access-control-allow-origin" in other.headers) == (origins == ["*"])
