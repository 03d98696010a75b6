"""`m1serve chat`: a terminal client of a running server; one question, or a conversation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from m1serve.cli import options
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam


def chat(
    message: Annotated[
        str | None, typer.Argument(help="One question; none starts a dialogue.")
    ] = None,
    config: options.ConfigFile = None,
    home: options.Home = None,
    port: options.Port = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Server (default: the configured port).")
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY")] = "none",
    model: Annotated[str | None, typer.Option("--model", help="Model name to ask for.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="Let it work on a built-in task, such as refund/report/1."),
    ] = None,
    show_thinking: Annotated[bool, typer.Option("--thinking/--no-thinking")] = True,
) -> None:
    """Talks to a running server."""
    settings = options.read_settings(config=config, home=home, port=port)
    url = base_url or f"http://{settings.serve.host}:{settings.serve.port}/v1"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {url!r} has no scheme; wanted http://HOST:PORT/v1")
    name = model or settings.model.model_id
    if task is not None:
        print(_work_on(task, url=url, model=name, api_key=api_key))
        return
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=api_key, max_retries=0)
    messages: list[ChatCompletionMessageParam] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if message is not None:
        messages.append({"role": "user", "content": message})
        _answer(client, name, messages, show_thinking=show_thinking)
        return
    print(f"{name} at {url}; an empty line ends the conversation", file=sys.stderr)
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        answer = _answer(client, name, messages, show_thinking=show_thinking)
        messages.append({"role": "assistant", "content": answer})


def _work_on(task_id: str, *, url: str, model: str, api_key: str) -> str:
    """Plays one episode as an agent with the task's tools; returns all that was said."""
    import asyncio
    import uuid

    from m1serve.cli.demo_tables import transcript
    from m1serve.clients.agent import Agent, EpisodePlan, PlayedEpisode
    from m1serve.types import Mode

    session_id = f"chat-{uuid.uuid4().hex}"
    plan = EpisodePlan(task_id=task_id, session_id=session_id, group_key=session_id, mode=Mode.EVAL)

    async def play() -> PlayedEpisode:
        agent = Agent(url, model=model, api_key=api_key)
        try:
            return await agent.play(plan)
        finally:
            await agent.close()

    played = asyncio.run(play())
    if played.failures:
        raise ConfigError(f"no answer from {url}: {played.failures[0]}{_hint(played.failures[0])}")
    return f"{played.messages[0]['content']}\n\n{transcript(played.messages)}"


def _hint(failure: str) -> str:
    """Only where nobody listened: a server that refused has said why."""
    hint = "; is `m1serve up` running? Another port is --port PORT"
    return hint if "Connection error" in failure else ""


def _read_line() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _answer(
    client: OpenAI, model: str, messages: list[ChatCompletionMessageParam], *, show_thinking: bool
) -> str:
    """Prints the streamed answer; returns its text."""
    from openai import OpenAIError

    content: list[str] = []
    is_thinking = False
    grey, plain = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
    try:
        for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
            for choice in chunk.choices:
                thought = getattr(choice.delta, "reasoning_content", None)
                if thought and show_thinking:
                    is_thinking = True
                    print(f"{grey}{thought}{plain}", end="", flush=True)
                for call in choice.delta.tool_calls or ():
                    if call.function is not None:
                        print(call.function.name or "", call.function.arguments or "", end="")
                if choice.delta.content:
                    if is_thinking:
                        print()
                        is_thinking = False
                    content.append(choice.delta.content)
                    print(choice.delta.content, end="", flush=True)
    except OpenAIError as error:
        raise ConfigError(f"no answer from {client.base_url}: {error}{_hint(str(error))}") from None
    print()
    return "".join(content)
