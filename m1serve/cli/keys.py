"""`m1serve keys`: makes API keys. The server is given their digests and never sees one stored."""

from __future__ import annotations

import hashlib
import json
import secrets
from enum import StrEnum
from typing import Annotated

import typer

from m1serve.cli import options

app = typer.Typer(help="API keys: new.", no_args_is_help=True)


class KeyScope(StrEnum):
    """The words of serve.keys."""

    INFER = "infer"
    FEEDBACK = "feedback"
    READ = "read"
    ADMIN = "admin"


@app.command("new")
def new(
    scope: Annotated[
        list[KeyScope] | None,
        typer.Option("--scope", help="May be given again (default: infer, feedback, read)."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Keys of one tenant see the same sessions.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """A key, shown once, and the lines of the settings file that let it in."""
    key = f"sk-m1-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    scopes = list(scope or (KeyScope.INFER, KeyScope.FEEDBACK, KeyScope.READ))
    if as_json:
        print(json.dumps({"key": key, "sha256": digest, "scopes": scopes, "tenant": tenant}))
        return
    print(f"key, shown this once: {key}\n\n[[serve.keys]]")
    print(f'sha256 = "{digest}"')
    print(f"scopes = {json.dumps(scopes)}")
    if tenant is not None:
        print(f"tenant = {json.dumps(tenant)}")
