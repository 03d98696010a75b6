"""Does every client get the right message out of every kind of answer that we give?

    python -m venv build/clients
    build/clients/bin/pip install langchain-openai openai-agents litellm
    npm install --prefix build/clients-js ai@6 @ai-sdk/openai-compatible@2
    python benchmarks/clients/run.py --python build/clients/bin/python --node-dir build/clients-js

Starts the server over a scripted engine and has each client read every kind in a process of its
own. openai-py comes with m1serve; clients whose place is not given are named as skipped, `--only`
takes the first letters of those wanted. Prints JSON; exits with 1 when a client misread anything.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from kinds import KEEP_ALIVE_S, Kind, all_kinds, expected, requests_file, script

from m1serve.clients.local_server import local_server

READERS = Path(__file__).parent / "readers"
READER_TIMEOUT_S = 300
ONE_CHOICE = "this client has no notion of more than one choice"
SETTINGS = ("engine.max_model_len=8192", "model.max_tokens=4096")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    name: str
    reader: str
    lacks: tuple[str, ...] = ()
    """Parts of a message that it shows to nobody, whatever the server."""
    skips: dict[str, str] = field(default_factory=dict)
    """Kinds it has no notion of, with the reason."""
    raises: dict[str, str] = field(default_factory=dict)
    """Kinds that it reports by an error of its own, which says this."""
    rewrites_tools: bool = False
    """The server reads other tools than were given, so that the prompt's length is another."""


_LENGTH = "finish_reason='length'"
CLIENTS = (
    Client(name="openai-py, raw", reader="openai_raw.py"),
    Client(name="openai-py, helpers", reader="openai_helper.py"),
    Client(
        name="langchain-openai",
        reader="langchain.py",
        lacks=("reasoning",),
        skips={"three choices, streamed": ONE_CHOICE},
    ),
    Client(
        name="openai-agents",
        reader="agents_sdk.py",
        lacks=("finish_reason",),
        skips={"three choices, streamed": ONE_CHOICE, "three choices, whole": ONE_CHOICE},
        raises={
            "length in the thought, streamed": _LENGTH,
            "length in the thought, whole": _LENGTH,
        },
    ),
    Client(
        name="litellm, openai",
        reader="litellm_openai.py",
        skips={"three choices, streamed": "it drops the later choices' finish_reason"},
    ),
    Client(
        name="litellm, hosted_vllm",
        reader="litellm_hosted_vllm.py",
        rewrites_tools=True,
        skips={"three choices, streamed": "it drops the later choices' finish_reason"},
    ),
    Client(
        name="@ai-sdk/openai-compatible",
        reader="vercel.mjs",
        skips={"three choices, streamed": ONE_CHOICE, "three choices, whole": ONE_CHOICE},
    ),
)


def problem(
    client: Client, kind: Kind, got: dict[str, Any], usage: dict[str, int] | None
) -> str | None:
    """What is wrong with what the client got; None when nothing is."""
    wanted_error = client.raises.get(kind.name, "" if not kind.choices else None)
    if "error" in got or wanted_error is not None:
        if wanted_error is None:
            return f"raised {got['error']}"
        is_right = "error" in got and wanted_error in got["error"]
        return None if is_right else f"wanted an error with {wanted_error!r}, got {got}"
    wanted = expected(kind)
    if len(got["choices"]) != len(wanted):
        return f"{len(got['choices'])} choices, wanted {len(wanted)}"
    for mine, theirs in zip(wanted, got["choices"], strict=True):
        for part in mine.keys() - set(client.lacks):
            if theirs[part] != mine[part]:
                return f"{part} is {theirs[part]!r}, wanted {mine[part]!r}"
    ids = [call_id for choice in got["choices"] for call_id in choice["call_ids"]]
    if not all(ids) or len(set(ids)) != len(ids):
        return f"ids of calls are {ids}"
    counted = got["usage"]
    if client.rewrites_tools and "tools" in kind.body and counted and usage:
        counted = counted | {"prompt_tokens": usage["prompt_tokens"]}
    return None if counted == usage else f"usage is {counted}, wanted {usage}"


def usages(url: str) -> dict[str, dict[str, int] | None]:
    """What the plain body of the same request says, where the answer carries it."""
    counted: dict[str, dict[str, int] | None] = {}
    with httpx.Client(verify=False, timeout=60) as http:
        for kind in all_kinds():
            counted[kind.name] = None
            if kind.choices and kind.has_usage:
                options = {"stream", "stream_options"}
                body = {k: v for k, v in kind.request.items() if k not in options}
                answer = http.post(f"{url}/chat/completions", json=body).raise_for_status()
                usage = answer.json()["usage"]
                counted[kind.name] = {k: usage[k] for k in ("prompt_tokens", "completion_tokens")}
    return counted


def why_missing(client: Client, options: argparse.Namespace) -> str | None:
    if client.reader.endswith(".mjs"):
        if options.node_dir is None:
            return "no --node-dir with ai and @ai-sdk/openai-compatible installed was given"
    elif not client.name.startswith("openai-py") and options.python is None:
        return "no --python of an environment with this client was given"
    return None


def read_all(client: Client, options: argparse.Namespace, url: str, file: Path) -> dict[str, Any]:
    """What the reader's process printed."""
    if client.reader.endswith(".mjs"):
        command, directory = ["node"], options.node_dir
    else:
        is_ours = client.name.startswith("openai-py")
        command, directory = [sys.executable if is_ours else str(options.python)], None
    done = subprocess.run(
        [*command, str(READERS / client.reader), url, str(file)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=READER_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{client.name}: its reader failed: {done.stderr[-2000:]}")
    # not splitlines: Node leaves the line separators of U+2028 and its kin in its JSON
    printed: dict[str, Any] = json.loads(done.stdout.strip("\n").split("\n")[-1])
    return printed


def judge(client: Client, printed: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in all_kinds() if kind.name not in client.skips]
    problems = {}
    for kind in kinds:
        wrong = problem(client, kind, printed["results"][kind.name], usage[kind.name])
        if wrong is not None:
            problems[kind.name] = wrong[:400]
    return {
        "name": client.name,
        "version": printed["version"],
        "passed": len(kinds) - len(problems),
        "of": len(kinds),
        "problems": problems,
        "not_exposed": list(client.lacks),
        "not_applicable": client.skips,
        "own_error": client.raises,
        "rewrites_tools": client.rewrites_tools,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    results, missing = [], {}
    with (
        tempfile.TemporaryDirectory() as directory,
        local_server(*SETTINGS, f"serve.keep_alive_s={KEEP_ALIVE_S}", script=script()) as server,
    ):
        url, file = f"{server.url}/v1", Path(directory) / "requests.json"
        file.write_text(requests_file())
        usage = usages(url)
        for client in CLIENTS:
            if options.only and not any(client.name.startswith(name) for name in options.only):
                continue
            reason = why_missing(client, options)
            if reason is not None:
                missing[client.name] = reason
                continue
            results.append(judge(client, read_all(client, options, url, file), usage))
            last = results[-1]
            print(f"{client.name}: {last['passed']} of {last['of']}", file=sys.stderr)
    return {"clients": results, "skipped": missing, "kinds": [k.name for k in all_kinds()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", type=Path, help="python of an environment with the clients")
    parser.add_argument("--node-dir", type=Path, help="directory whose node_modules has the SDK")
    parser.add_argument("--only", action="append", help="clients whose name begins with this")
    options = parser.parse_args()
    # relative to where we are, also in a process that is elsewhere
    options.python = options.python and options.python.absolute()
    report = measure(options)
    called = ["python", "benchmarks/clients/run.py", *sys.argv[1:]]
    print(json.dumps({"command": shlex.join(called), **report}, indent=1, ensure_ascii=False))
    return int(any(client["problems"] for client in report["clients"]))


if __name__ == "__main__":
    sys.exit(main())
