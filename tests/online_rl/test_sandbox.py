"""The sandbox against scorers that throw, hang, hog, crash and lie about the protocol."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.types import RewardStatus, StopCause, ToolCall, Turn

BAD_SCORERS = """
import os, tempfile, time
from m1serve.errors import RewardError
from m1serve.online_rl.scorers.process import serve
from m1serve.types import Reward

class Bad:
    name, version = "bad", "7"
    def score(self, turns, task_id):
        if task_id == "throw": raise KeyError("no such order")
        if task_id == "refuse": raise RewardError("not mine")
        if task_id == "sleep": time.sleep(60)
        if task_id == "loop":
            while True: pass
        if task_id == "hog": return Reward(value=float(len(bytearray(2**30))))
        if task_id == "crash": os.abort()
        if task_id == "exit": os._exit(3)
        if task_id == "print": print("garbage {")
        if task_id == "flood": return Reward(value=1.0, evidence="x" * 2**21)
        if task_id == "env": return Reward(value=1.0, evidence=",".join(sorted(os.environ)))
        if task_id == "big_file":
            with tempfile.TemporaryFile(buffering=0) as file:
                while True: file.write(bytes(2**18))
        if task_id == "files":
            keep = [open("/dev/null") for _ in range(500)]
        return Reward(value=float(len(turns)), components={"n": 1.0}, evidence=turns[0].content)

serve(lambda task_id: Bad())
"""
TURN = Turn(
    turn_id="t",
    text="<think>\nx\n</think>\nhé\n",
    reasoning="x",
    content="hé",
    tool_calls=(ToolCall(name="get_order", arguments='{"order_id": "1"}', id="a"),),
    is_well_formed=True,
    stop=StopCause.EOS,
    num_tokens=5,
)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    script = tmp_path_factory.mktemp("bad") / "bad.py"
    script.write_text(BAD_SCORERS)
    command = (sys.executable, "-I", str(script))
    with Sandbox(timeout_s=1.0, memory_bytes=512 * 2**20, command=command) as box:
        yield box


def is_usable(sandbox: Sandbox) -> bool:
    return sandbox.score([TURN, TURN], "good").reward.value == 2.0


def test_a_good_scorer_answers_with_everything(sandbox: Sandbox) -> None:
    verdict = sandbox.score([TURN], "good")
    assert (verdict.scorer, verdict.version) == ("bad", "7")
    assert verdict.reward.value == 1.0
    assert verdict.reward.status is RewardStatus.OK
    assert verdict.reward.components == {"n": 1.0}
    assert verdict.reward.evidence == "hé"


@pytest.mark.parametrize("how", ["throw", "hog", "files", "big_file"])
def test_a_scorer_that_raises_is_masked_and_its_process_kept(sandbox: Sandbox, how: str) -> None:
    assert is_usable(sandbox)
    before = sandbox.num_starts
    verdict = sandbox.score([TURN], how)
    assert verdict.reward.value is None
    assert verdict.reward.status is RewardStatus.CRASHED
    assert is_usable(sandbox)
    if how == "throw":
        assert "KeyError" in verdict.reward.evidence
        assert sandbox.num_starts == before


@pytest.mark.parametrize("how", ["crash", "exit", "flood"])
def test_a_scorer_that_dies_is_masked_and_replaced(sandbox: Sandbox, how: str) -> None:
    verdict = sandbox.score([TURN], how)
    assert verdict.reward.value is None
    assert verdict.reward.status is RewardStatus.CRASHED
    assert is_usable(sandbox)


@pytest.mark.parametrize("how", ["sleep", "loop"])
def test_a_scorer_that_hangs_times_out_and_is_killed(sandbox: Sandbox, how: str) -> None:
    assert is_usable(sandbox)
    begin = time.monotonic()
    verdict = sandbox.score([TURN], how)
    assert verdict.reward.value is None
    assert verdict.reward.status is RewardStatus.TIMEOUT
    assert time.monotonic() - begin < 3.0
    assert is_usable(sandbox)


def test_a_child_that_never_starts_is_masked() -> None:
    with Sandbox(timeout_s=1.0, memory_bytes=2**30, command=("/bin/false",)) as box:
        for _ in range(3):
            reward = box.score([TURN] * 100, "good").reward
            assert (reward.value, reward.status) == (None, RewardStatus.CRASHED)
            assert "exited with 1" in reward.evidence


def test_a_scorer_that_refuses_is_not_tried_again(sandbox: Sandbox) -> None:
    reward = sandbox.score([TURN], "refuse").reward
    assert (reward.value, reward.status) == (None, RewardStatus.UNCOMPUTABLE)
    assert reward.evidence == "not mine"


def test_prints_do_not_garble_the_protocol(sandbox: Sandbox) -> None:
    assert sandbox.score([TURN], "print").reward.value == 1.0


def test_the_environment_is_cleared(sandbox: Sandbox) -> None:
    os.environ["M1SERVE_SECRET_FOR_TEST"] = "1"
    try:
        names = sandbox.score([TURN], "env").reward.evidence.split(",")
    finally:
        del os.environ["M1SERVE_SECRET_FOR_TEST"]
    assert set(names) <= {"PATH", "LANG", "OMP_NUM_THREADS", "LC_CTYPE"}


def test_closing_kills_the_process_group(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        "import subprocess, sys\n"
        "from m1serve.types import Reward\n"
        "from m1serve.online_rl.scorers.process import serve\n"
        "class Forks:\n"
        "    name, version = 'forks', '1'\n"
        "    def score(self, turns, task_id):\n"
        "        child = subprocess.Popen(['/bin/sleep', '60'])\n"
        "        return Reward(value=1.0, evidence=str(child.pid))\n"
        "serve(lambda task_id: Forks())\n"
    )
    with Sandbox(
        timeout_s=5.0, memory_bytes=2**30, command=(sys.executable, "-I", str(script))
    ) as box:
        pid = int(box.score([TURN], "x").reward.evidence)
    deadline = time.monotonic() + 3
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
