"""Cold start: trains a model of the recipe's shape on demonstrations of mixed quality.

    m1serve sft --recipe benchmarks/nano/recipe.toml --out OUT

An accelerator does it in minutes, two CPU cores in hours. Online training starts from the result.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from m1serve.chat.tokenizer import BOS, ChatTokenizer
from m1serve.errors import ConfigError
from m1serve.model.checkpoint import load_model, save_model
from m1serve.model.directory import CONFIG_FILE
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.token_ids import TOKENIZER_FILE
from m1serve.online_rl.demonstrations import sample_texts
from m1serve.online_rl.sft_batches import DemonstrationBatches, Part, measure_widths
from m1serve.online_rl.sft_loss import GradientPass
from m1serve.online_rl.sft_recipe import Schedule, SftRecipe, read_recipe
from m1serve.online_rl.sft_tokenizer import bare_tokenizer, save_tokenizer, train_tokenizer

LOG_FILE = "sft-log.jsonl"
_LOG_EVERY_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftResult:
    steps: int
    tokens: int
    """Rows' own tokens, padding and shared prompts left out."""
    seconds: float
    loss: dict[str, float]
    """Last mean cross entropy of a said token, by part of the batch."""


def main(
    recipe: Path,
    out: Path,
    *,
    init: Path | None = None,
    steps: int | None = None,
    max_seconds: float = math.inf,
    workers: int = 0,
    device: str | None = None,
) -> SftResult:
    """Writes a model directory to `out`. `init` continues from one; the schedule starts anew."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = read_recipe(recipe)
    if init is not None:
        _check_init(init, out)
    schedule = settings.schedule
    torch.manual_seed(schedule.seed)
    torch.set_float32_matmul_precision("high")
    model = _start(settings, out, init, device or _best_device())
    cold_start = ColdStart(model, settings, out, workers=workers)
    result = cold_start.run(steps or schedule.steps, max_seconds)
    save_model(model, out, dtype=torch.bfloat16)
    return result


class ColdStart:
    def __init__(
        self, model: M1ForCausalLM, recipe: SftRecipe, out: Path, *, workers: int = 0
    ) -> None:
        self.model, self.recipe, self.out = model.train(), recipe, out
        self.gradients = GradientPass(model, recipe.schedule)
        self.optimizer = _optimizer(model, recipe.schedule)
        self.batches = _loader(recipe, out, workers)
        self._said: dict[str, list[tuple[Tensor, int]]] = {}
        self._logged_at = 0.0

    def run(self, steps: int, max_seconds: float) -> SftResult:
        """The schedule ends with the steps, or with the time if that comes first."""
        start, tokens, step = time.monotonic(), 0, 0
        loss: dict[str, float] = {}
        for parts in self.batches:
            seconds = time.monotonic() - start
            progress = max(step / steps, seconds / max_seconds)
            if progress >= 1:
                break
            tokens += self._step(parts, progress)
            step += 1
            if seconds - self._logged_at > _LOG_EVERY_S or step == steps:
                self._logged_at = seconds
                loss = self._report(step, tokens, seconds)
        return SftResult(steps=step, tokens=tokens, seconds=time.monotonic() - start, loss=loss)

    def _step(self, parts: list[Part], progress: float) -> int:
        schedule = self.recipe.schedule
        num_said = [p.num_said for p in parts]
        for part, said in zip(parts, num_said, strict=True):
            loss = self.gradients.add(part, 1.0 / sum(num_said))
            self._said.setdefault(part.name, []).append((loss, said))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), schedule.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, schedule)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return sum(p.num_tokens for p in parts)

    def _report(self, step: int, tokens: int, seconds: float) -> dict[str, float]:
        loss = {
            kind: float(torch.stack([total for total, _ in seen]).sum())
            / sum(count for _, count in seen)
            for kind, seen in self._said.items()
        }
        self._said = {}
        row = {"step": step, "tokens": tokens, "seconds": round(seconds, 1), "loss": loss}
        _log.info("cold start %s", row)
        with (self.out / LOG_FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return loss


def learning_rate(progress: float, schedule: Schedule) -> float:
    """A short linear warm-up, then a cosine down to the floor."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    warm = min(1.0, (progress + 1e-4) / schedule.warmup)
    return schedule.lr * warm * (schedule.floor + (1 - schedule.floor) * cosine)


def _optimizer(model: M1ForCausalLM, schedule: Schedule) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, 0.95), eps=1e-10, fused=True)


def _loader(recipe: SftRecipe, out: Path, workers: int) -> DataLoader[list[Part]]:
    widths = measure_widths(out, recipe.batch, recipe.demonstrations)
    batches = DemonstrationBatches(
        out, recipe.batch, recipe.demonstrations, widths, recipe.schedule.seed
    )
    _log.info("rows are cut to %s", asdict(widths))
    # forked workers would inherit the accelerator's threads and locks
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        multiprocessing_context="spawn" if workers else None,
    )


def _check_init(init: Path, out: Path) -> None:
    missing = [name for name in (CONFIG_FILE, TOKENIZER_FILE) if not (init / name).is_file()]
    if missing:
        raise ConfigError(
            f"--init {init} is no model directory: it has no {' and no '.join(missing)}"
        )
    if out.resolve() == init.resolve():
        raise ConfigError(f"--init and --out are both {out}; give the result another directory")


def _start(recipe: SftRecipe, out: Path, init: Path | None, device: str) -> M1ForCausalLM:
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG_FILE).write_text("")
    if init is not None:
        shutil.copyfile(init / TOKENIZER_FILE, out / TOKENIZER_FILE)
        return load_model(init, device=device)
    rng = random.Random("tokenizer")
    texts = sample_texts(bare_tokenizer(), recipe.tokenizer.texts, rng, recipe.demonstrations)
    save_tokenizer(train_tokenizer(texts, recipe.tokenizer.vocab_size), out)
    tok = ChatTokenizer.load(out)
    vocab_size = -(-tok.vocab_size // 64) * 64
    config = recipe.model.config(vocab_size, tok.control_ids[BOS], tok.eos_id)
    model = M1ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(recipe.schedule.seed))
    return model.to(device)


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
