"""What the OpenAPI page says holds for requests that schemathesis makes up from it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.openapi import from_url
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from m1serve.api import create_app
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.config import EngineSettings, ModelSettings, Settings
from m1serve.engine.scripted import ScriptedEngine, ScriptedReply
from m1serve.store import Store
from m1serve.store.journal import JournalWriter

REPLY = "<think>\nEasy.\n</think>\nHello there."
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
BOUNDED = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread: schemathesis is not asynchronous."""
    directory: Path = tmp_path_factory.mktemp("journal")
    engine_settings = EngineSettings(kind="scripted")
    tokenizer, journal = byte_tokenizer(), JournalWriter(directory)
    engine = ScriptedEngine(
        lambda _: ScriptedReply(text=REPLY), tokenizer=tokenizer, settings=engine_settings
    )
    model = ModelSettings(model_id="nano", max_tokens=32)
    app = create_app(
        engine,
        journal,
        Settings(engine=engine_settings, model=model),
        tokenizer,
        open_store=lambda: Store.open(f"sqlite:///{directory / 'ledger.db'}"),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            journal.close()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_leaves_what_the_page_promises(url: str, mode: GenerationMode) -> None:
    schema = from_url(f"{url}/openapi.json", wait_for_schema=10)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        seen.add(operation.label)
        if mode is GenerationMode.NEGATIVE and not operation.body:
            # any string is a name in a path
            continue

        @BOUNDED
        @given(operation.as_strategy(generation_mode=mode))
        def holds(case: Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=20)

        holds()
    assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/feedback"} <= seen


def test_the_server_is_idle_and_answers_after_all_of_them(url: str) -> None:
    health = httpx.get(f"{url}/health", verify=False).json()
    assert (health["status"], health["running"], health["waiting"]) == ("ok", 0, 0)
