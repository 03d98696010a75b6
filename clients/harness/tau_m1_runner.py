"""Runs the clone's ToolCallingAgent with M1's settings; a program for the harness's interpreter.

It imports the user's tau_bench and the standard library, nothing of m1serve, and writes results of
the same form as the clone's run.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MAX_STEPS = 40
TEMPERATURE = 1.0
TOP_P = 0.95


def main() -> None:
    arguments = _arguments()
    from tau_bench.agents import tool_calling_agent
    from tau_bench.envs import get_env

    # the agent names a temperature and no top_p
    tool_calling_agent.completion = functools.partial(tool_calling_agent.completion, top_p=TOP_P)
    prompt = Path(arguments.prompt_file).read_text(encoding="utf-8").strip()

    def world(index: int) -> Any:  # noqa: ANN401 - an Env of the clone
        return get_env(
            arguments.env,
            user_strategy="llm",
            user_model=arguments.user_model,
            user_provider=arguments.user_model_provider,
            task_split="test",
            task_index=index,
        )

    def play(index: int, trial: int) -> dict[str, Any]:
        row: dict[str, Any] = {"task_id": index, "trial": trial, "reward": 0.0, "traj": []}
        try:
            env = world(index)
            agent = tool_calling_agent.ToolCallingAgent(
                tools_info=env.tools_info,
                wiki=f"{prompt}\n\n{env.wiki}",
                model=arguments.model,
                provider=arguments.model_provider,
                temperature=TEMPERATURE,
            )
            solved = agent.solve(env=env, task_index=index, max_num_steps=MAX_STEPS)
            row |= {"reward": solved.reward, "info": solved.info, "traj": solved.messages}
        except Exception as error:  # noqa: BLE001 - as in run.py: one task must not end the others
            row["info"] = {"error": str(error), "traceback": traceback.format_exc()}
        print(f"task {index} trial {trial}: {row['reward']}", flush=True)
        return row

    indices = arguments.task_ids or range(len(world(0).tasks))
    pairs = [(index, trial) for trial in range(arguments.num_trials) for index in indices]
    with ThreadPoolExecutor(arguments.max_concurrency) as pool:
        rows = list(pool.map(lambda pair: play(*pair), pairs))
    file = Path(arguments.log_dir) / f"m1-{arguments.env}-{time.strftime('%m%d%H%M%S')}.json"
    file.write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("prompt-file", "env", "model", "model-provider", "log-dir"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("user-model", "user-model-provider"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--num-trials", type=int, default=1)
    parser.add_argument("--max-concurrency", type=int, default=1)
    parser.add_argument("--task-ids", type=int, nargs="*", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
