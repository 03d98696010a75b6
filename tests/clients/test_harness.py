"""Harnesses: clones, answers and results are read; the genuine ones run where a clone is given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m1serve.cli.app import app
from m1serve.clients.harness.agentless import is_right, read_instances
from m1serve.clients.harness.clone import TAU, check_clone, check_endpoint, harness_python
from m1serve.clients.harness.play import Call, script_text, with_wrong_argument
from m1serve.clients.harness.process import Endpoint
from m1serve.clients.harness.report import Attempt, pass_hat
from m1serve.clients.harness.tau import TauPlan, run_tau
from m1serve.clients.harness.tau2_script import tau2_script
from m1serve.clients.harness.tau_script import tau_script
from m1serve.clients.local_server import local_server
from m1serve.errors import ConfigError

TOY = Path(__file__).parent / "toy_shapes"
TASKS = """
TASKS_TEST = [
    Task(annotator="0", user_id="u", instruction="You want A.",
         actions=[Action(name="get_order", kwargs={"id": "#1"}),
                  Action(name="cancel", kwargs={"items": [{"id": "7"}], "why": "late"})],
         outputs=["12"]),
    Task(annotator="0", user_id="u", instruction="You want A.", actions=[], outputs=[]),
]
"""


def tau_clone(folder: Path) -> Path:
    file = folder / "tau_bench" / "envs" / "retail" / "tasks_test.py"
    file.parent.mkdir(parents=True)
    file.write_text(TASKS)
    return folder


def test_the_answers_are_read_without_importing_the_clone(tmp_path: Path) -> None:
    lines = tau_script(tau_clone(tmp_path), "retail")
    user = [line for line in lines if "You want A." in str(line.get("when"))]
    assert [line.get("turn") for line in user] == [0, 1, None]
    agent = [line["text"] for line in lines if "retail 0" in str(line.get("when"))]
    assert '"name": "get_order"' in str(agent[0])
    assert '"name": "cancel"' in str(agent[1])
    assert str(agent[2]).endswith("All done. 12")


def test_a_mutated_task_differs_in_one_argument_of_its_first_write(tmp_path: Path) -> None:
    good = tau_script(tau_clone(tmp_path), "retail")
    with pytest.raises(ValueError, match="no call writes"):
        tau_script(tmp_path, "retail", num_mutated=2)
    bad = tau_script(tmp_path, "retail", num_mutated=1)
    different = [b for a, b in zip(good, bad, strict=True) if a != b]
    assert len(different) == 1
    assert '{"id": "7-wrong"}' in str(different[0]["text"])
    call = Call(name="cancel", arguments={"id": "7"})
    with_wrong_argument([call])
    assert call.arguments == {"id": "7"}


def test_tau2_plays_begun_conversations_from_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "data" / "tau2" / "domains" / "mock" / "tasks.json"
    file.parent.mkdir(parents=True)
    action = {"name": "update", "arguments": {"id": "1"}}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Done so far."}]
    scenario = {"instructions": "You go on."}
    criteria = {"actions": [action], "nl_assertions": ["it's done"]}
    task = {"id": "t", "user_scenario": scenario, "evaluation_criteria": criteria}
    begun = {**task, "id": "b", "initial_state": {"message_history": history}}
    file.write_text(json.dumps([task, begun]))
    lines = tau2_script(tmp_path, "mock")
    firsts = {str(line["when"]): line["turn"] for line in reversed(lines) if "turn" in line}
    assert firsts["\tYou go on."] == 0
    assert firsts["user\nDone so far."] == 1
    assert json.loads(str(lines[0]["text"]))["results"][0]["metExpectation"] is True


def test_pass_hat_is_the_chance_that_all_of_k_succeed() -> None:
    attempts = [("a", 1.0), ("a", 1.0), ("b", 1.0), ("b", 0.0)]
    assert pass_hat(tuple(Attempt(task=t, reward=r) for t, r in attempts)) == {"1": 0.75, "2": 0.5}


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="git clone"):
        check_clone(tmp_path, TAU)
    with pytest.raises(ConfigError, match="no interpreter at"):
        harness_python(TAU, tmp_path / "python")
    with pytest.raises(ConfigError, match="no OpenAI endpoint"):
        check_endpoint("http://127.0.0.1:1/v1", "k", "m")
    done = CliRunner().invoke(app, ["bench", "tau", "--dir", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)


def test_the_toy_patch_is_judged_by_the_toy_test() -> None:
    (instance,) = read_instances(TOY / "instances.jsonl")
    assert instance["repo_dir"] == str(TOY)
    patch = (
        "--- a/shapes/area.py\n+++ b/shapes/area.py\n@@ -12,3 +12,3 @@\n"
        '     """The area of a rectangle."""\n'
        "-    return width + height\n+    return width {} height\n \n"
    )
    assert is_right(patch.format("*"), TOY, "check.py")
    assert not is_right(patch.format("-"), TOY, "check.py")
    assert not is_right("", TOY, "check.py")


@pytest.mark.slow
def test_genuine_tau_bench_rewards_the_right_answers_and_no_others(tmp_path: Path) -> None:
    given = os.environ.get("M1SERVE_TAU_BENCH_DIR")
    python = os.environ.get("M1SERVE_TAU_BENCH_PYTHON")
    if given is None or python is None:
        pytest.skip("set M1SERVE_TAU_BENCH_DIR and _PYTHON to a clone and its interpreter")
    clone = check_clone(Path(given), TAU)
    for num_mutated, reward in ((0, 1.0), (3, 0.0)):
        text = script_text(tau_script(clone.directory, "retail", num_mutated=num_mutated))
        settings = ("engine.max_model_len=131072", 'model.aliases=["user-sim"]')
        with local_server(*settings, script=text) as server:
            agent, user = (
                Endpoint(base_url=f"{server.url}/v1", api_key="none", model=name)
                for name in ("nano", "user-sim")
            )
            plan = TauPlan(agent=agent, user=user, domain="retail", tasks=(0, 1, 2), concurrency=3)
            out = tmp_path / str(num_mutated)
            out.mkdir()
            report = run_tau(clone, harness_python(TAU, Path(python)), plan, out)
        assert report.reward == reward
        assert all(attempt.error is None for attempt in report.attempts)
