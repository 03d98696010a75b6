"""How far CISPO lifts a cold-started model, in one process and without the service around it.

    python benchmarks/nano/rl_check.py m1serve/model/nano --out rl-check.json

It answers one question about a model directory: is the careful way of working in its support?
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.envs import FAMILIES, task_ids
from m1serve.model.checkpoint import load_model, save_model
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.advantages import group_advantages
from m1serve.online_rl.cispo import cispo_loss
from m1serve.online_rl.sft_rollout import Rollout, play, prompt_states
from m1serve.online_rl.sft_success import measure_success


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    rollout: Rollout
    advantage: float
    norm: float
    """1 / (sampled tokens of the group × groups in the minibatch)"""


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    tok, model = ChatTokenizer.load(args.weights), load_model(args.weights, device=args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0
    )
    generator = torch.Generator(args.device).manual_seed(args.seed)
    rows = [evaluation(model, tok, args, cycle=0)]
    for cycle in range(1, args.cycles + 1):
        start = time.monotonic()
        groups = sample_groups(model, tok, args, cycle, generator)
        batches = minibatches(groups, args.minibatches, random.Random(cycle))
        gaps = [train(model, optimizer, batch, args.weight_max) for batch in batches]
        reward = sum(r.reward for g in groups for r in g) / (len(groups) * args.group)
        row = {"cycle": cycle, "reward": round(reward, 4), "minibatches": len(batches)}
        row |= {"seconds": round(time.monotonic() - start, 1), "gap": gaps[0] if gaps else None}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if cycle % args.eval_every == 0 or cycle == args.cycles:
            rows.append(evaluation(model, tok, args, cycle=cycle))
        if args.out:
            args.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    if args.save:
        save_model(model, args.save, dtype=torch.bfloat16)


def evaluation(
    model: M1ForCausalLM, tok: ChatTokenizer, args: argparse.Namespace, *, cycle: int
) -> dict[str, object]:
    measured = measure_success(model, tok, "report", args.eval_tasks, seed=args.seed + 7)
    row = {"cycle": cycle, "report": {name: s.to_dict() for name, s in measured.items()}}
    print(cycle, {name: round(100 * s.rate, 1) for name, s in measured.items()}, flush=True)
    return row


def sample_groups(
    model: M1ForCausalLM,
    tok: ChatTokenizer,
    args: argparse.Namespace,
    cycle: int,
    generator: torch.Generator,
) -> list[list[Rollout]]:
    each = args.tasks // len(FAMILIES)
    seed = 1000 * (args.seed + 1) + cycle
    tasks = [t for f in FAMILIES for t in task_ids("train", f, each, seed)]
    played = play(model, tok, [t for t in tasks for _ in range(args.group)], generator)
    return [played[i : i + args.group] for i in range(0, len(played), args.group)]


def minibatches(
    groups: Sequence[list[Rollout]], count: int, rng: random.Random
) -> list[list[Sample]]:
    """Groups with a signal, whole, in at most `count` parts."""
    scored = [(g, a) for g in groups if (a := group_advantages([r.reward for r in g]))]
    rng.shuffle(scored)
    num = min(count, len(scored))
    parts = [scored[i * len(scored) // num : (i + 1) * len(scored) // num] for i in range(num)]
    return [
        [
            Sample(rollout=r, advantage=a or 0.0, norm=1 / (sum(x.num_said for x in g) * len(part)))
            for g, advantages in part
            for r, a in zip(g, advantages, strict=True)
        ]
        for part in parts
    ]


def train(
    model: M1ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[Sample], weight_max: float
) -> float:
    """One step; returns the mean |trainer - sampler| logprob before it."""
    logp_N, old_N, advantage_N, norm_N = streams(model, batch)
    cispo_loss(logp_N, old_N, advantage_N, norm_N, weight_max=weight_max).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float((logp_N.detach() - old_N).abs().mean())


def streams(model: M1ForCausalLM, batch: list[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Policy and sampler logprobs, advantage and normaliser, flat over the sampled tokens."""
    width = max(len(s.rollout.ids) for s in batch)
    ids_BT = torch.zeros(len(batch), width, dtype=torch.long)
    is_said_BT = torch.zeros(len(batch), width, dtype=torch.bool)
    values_3BT = torch.zeros(3, len(batch), width)
    for i, s in enumerate(batch):
        num = len(s.rollout.ids)
        ids_BT[i, :num] = torch.tensor(s.rollout.ids)
        is_said_BT[i, :num] = torch.tensor(s.rollout.is_said)
        values_3BT[0, i, :num] = torch.tensor(s.rollout.logprobs)
        values_3BT[1, i], values_3BT[2, i] = s.advantage, s.norm
    device = model.lm_head.weight.device
    ids_BT, said_BT = ids_BT.to(device), is_said_BT.to(device)[:, 1:]
    state, pick_B = prompt_states(model, [s.rollout.prompt_ids for s in batch])
    hidden_BTE, _ = model.hidden(ids_BT[:, :-1], state.select(pick_B))
    logp_NV = torch.log_softmax(model.logits(hidden_BTE[said_BT]), -1)
    logp_N = logp_NV.gather(1, ids_BT[:, 1:][said_BT][:, None]).squeeze(1)
    old_N, advantage_N, norm_N = (v[:, 1:][said_BT] for v in values_3BT.to(device))
    return logp_N, old_N, advantage_N, norm_N


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--out", type=Path, help="JSON lines, one a cycle or evaluation")
    parser.add_argument("--save", type=Path, help="directory for the trained model")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--weight-max", type=float, default=5.0)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--eval-tasks", type=int, default=60, help="report tasks a family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
