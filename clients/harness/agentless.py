"""Agentless: the clone's own localise, repair and rerank programs over local repositories.

SWE-bench's own evaluation needs Docker and is not run here: a patch is judged by the instance's
`check`, a program of its repository, or not at all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from m1serve.clients.harness.clone import Clone
from m1serve.clients.harness.process import Endpoint, harness_environment, run_program
from m1serve.errors import ConfigError

MODELS = ("gpt-4o-2024-05-13", "gpt-4o-mini-2024-07-18")
"""The only ones its --model takes with an OpenAI endpoint; the server needs one as an alias."""
CHECK_S = 60
NUM_SAMPLES = 10
_NEEDED = ("instance_id", "repo", "base_commit", "problem_statement", "repo_dir")
_STRUCTURE = (
    "import json, sys; from get_repo_structure.get_repo_structure import create_structure; "
    "json.dump({'structure': create_structure(sys.argv[1])}, open(sys.argv[2], 'w'))"
)
_TIKTOKEN = (
    "import importlib.util, pathlib; "
    "print(pathlib.Path(importlib.util.find_spec('llama_index.core').origin).parent"
    " / '_static' / 'tiktoken_cache')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    instance_id: str
    text: str
    """A git diff; empty when there is none."""
    is_correct: bool | None
    """None: the instance has no check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentlessReport:
    commit: str | None
    model: str
    patches: tuple[Patch, ...]
    wall_s: float
    warning: str | None

    def as_json(self) -> dict[str, object]:
        judged = [p.is_correct for p in self.patches if p.is_correct is not None]
        return {
            **asdict(self),
            "instances": len(self.patches),
            "patched": sum(bool(p.text) for p in self.patches),
            "patch_correct": all(judged) if judged else None,
        }


def read_instances(file: Path) -> list[dict[str, str]]:
    """JSON lines as SWE-bench has them, each with `repo_dir` (a checkout, relative to the file)."""
    if not file.is_file():
        raise ConfigError(f"no instances at {file}; wanted JSON lines with {', '.join(_NEEDED)}")
    instances = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        raw = json.loads(line)
        missing = [key for key in _NEEDED if key not in raw]
        if missing:
            raise ConfigError(f"{file}:{number} lacks {', '.join(missing)}")
        raw["repo_dir"] = str((file.parent / raw["repo_dir"]).resolve())
        instances.append(raw)
    return instances


def run_agentless(
    clone: Clone, python: Path, endpoint: Endpoint, instances: Sequence[dict[str, str]], out: Path
) -> AgentlessReport:
    """The six programs one after the other in `out`, with the settings of the clone's README."""
    if endpoint.model not in MODELS:
        raise ConfigError(
            f"Agentless takes --model {' or '.join(MODELS)} only, got {endpoint.model!r}; give the "
            f"server an alias: --set 'model.aliases=[\"{MODELS[0]}\"]'"
        )
    environment = harness_environment(endpoint, python_path=clone.directory)
    found = subprocess.run([python, "-c", _TIKTOKEN], capture_output=True, text=True, check=True)
    environment |= {
        "TIKTOKEN_CACHE_DIR": found.stdout.strip(),
        "PROJECT_FILE_LOC": str(out / "structures"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(out / "hf"),
    }
    started = time.monotonic()
    log_file = out / "harness.log"
    _lay_out(instances, out)
    for instance in instances:
        structure = out / "structures" / f"{instance['instance_id']}.json"
        run_program(
            [python, "-c", _STRUCTURE, instance["repo_dir"], structure],
            environment=environment,
            cwd=out,
            log_file=log_file,
        )
    for program, arguments in _steps(endpoint.model):
        run_program(
            [python, clone.directory / "agentless" / program, *arguments],
            environment=environment,
            cwd=out,
            log_file=log_file,
        )
    return AgentlessReport(
        commit=clone.commit,
        model=endpoint.model,
        patches=tuple(_patch(instance, out / "all_preds.jsonl") for instance in instances),
        wall_s=time.monotonic() - started,
        warning=clone.warning,
    )


def is_right(patch: str, repository: Path, check: str) -> bool:
    """Whether the patch applies to a copy of the repository and its check then passes."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "repository"
        shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("__pycache__"))
        apply = ["git", "apply", "--unsafe-paths", "-"]
        if subprocess.run(apply, input=patch, text=True, cwd=copy, check=False).returncode != 0:
            return False
        done = subprocess.run([sys.executable, check], cwd=copy, check=False, timeout=CHECK_S)
        return done.returncode == 0


def _steps(model: str) -> list[tuple[str, list[str]]]:
    def localise(folder: str, *arguments: str) -> tuple[str, list[str]]:
        return "fl/localize.py", ["--output_folder", f"loc/{folder}", "--model", model, *arguments]

    def after(folder: str) -> list[str]:
        return ["--top_n", "3", "--start_file", f"loc/{folder}/loc_outputs.jsonl"]

    samples = ["--num_samples", "4"]
    lines = ["--fine_grain_line_level", "--compress", "--temperature", "0.8", *samples]
    repair = ["--loc_file", "loc/merged/loc_merged_0-0_outputs.jsonl", "--output_folder", "repair"]
    repair += ["--loc_interval", "--top_n", "3", "--max_samples", str(NUM_SAMPLES), "--cot"]
    repair += ["--diff_format", "--gen_and_process", "--model", model]
    rank = ["--patch_folder", "repair", "--num_samples", str(NUM_SAMPLES), "--deduplicate"]
    compress = ["--related_level", "--compress", "--compress_assign"]
    return [
        localise("files", "--file_level"),
        localise("related", *compress, *after("files")),
        localise("edits", *lines, *after("related")),
        localise("merged", "--merge", *samples, *after("edits")),
        ("repair/repair.py", repair),
        ("repair/rerank.py", rank),
    ]


def _lay_out(instances: Sequence[dict[str, str]], out: Path) -> None:
    """The data set where `datasets` finds it without the hub: a folder of its name."""
    (out / "structures").mkdir(parents=True, exist_ok=True)
    data = out / "princeton-nlp" / "SWE-bench_Lite"
    data.mkdir(parents=True, exist_ok=True)
    with (data / "test.jsonl").open("w", encoding="utf-8") as file:
        for instance in instances:
            file.write(json.dumps(instance) + "\n")


def _patch(instance: dict[str, str], predictions: Path) -> Patch:
    rows = [json.loads(line) for line in predictions.read_text(encoding="utf-8").splitlines()]
    name = instance["instance_id"]
    text = next((row["model_patch"] for row in rows if row["instance_id"] == name), "")
    check = instance.get("check")
    verdict = is_right(text, Path(instance["repo_dir"]), check) if check else None
    return Patch(instance_id=name, text=text, is_correct=verdict)
