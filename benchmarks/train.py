"""Training speed of the Learner on random weights of nano's size, with and without shared prefixes.

    python benchmarks/train.py [--groups 8] [--threads 1] [--desks 1]

Synthetic episodes in nano's proportions: a system prefix of 290 tokens, 130 tokens after it, 60 of
them sampled; 8 attempts a group; `--desks` says how many different system prefixes there are. JSON
out. `ledger_tokens_per_s` counts every token of every episode, as an unshared trainer would read
them; `model_tokens_per_s` those that really went through the model. Rates per CPU second are the
ones to trust on a machine that others use, with one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence

import torch

from m1serve.config import Settings, TrainSettings
from m1serve.model.directory import read_config
from m1serve.model.tiny import random_model
from m1serve.online_rl.cispo import cispo_loss
from m1serve.online_rl.forward import token_streams, trained_logprobs
from m1serve.online_rl.learner import Learner, StepRecord
from m1serve.online_rl.packing import Microbatch, Row, pack_microbatches, split_minibatches
from m1serve.online_rl.samples import Group, Sample

PREFIX, HEARD, SAID, GROUP_SIZE = 290, 70, 60, 8


def make_groups(num: int, num_desks: int) -> list[Group]:
    rng = random.Random(0)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 890) for _ in range(num_tokens))

    desks = [draw(PREFIX) for _ in range(num_desks)]
    groups = []
    for i in range(num):
        prompt = desks[i % num_desks] + draw(HEARD)
        samples = [make_sample(f"{i}", prompt, draw(SAID + j), j) for j in range(GROUP_SIZE)]
        groups.append(Group(key=f"{i}", samples=tuple(samples)))
    return groups


def make_sample(group: str, prompt: Sequence[int], said: Sequence[int], attempt: int) -> Sample:
    return Sample(
        trajectory_id=f"{group}/{attempt}",
        group=group,
        advantage=(-1.0) ** attempt,
        token_ids=(*prompt, *said),
        is_trained=(*[False] * len(prompt), *[True] * len(said)),
        logprobs=(*[math.nan] * len(prompt), *[-1.0] * len(said)),
        versions=(*[""] * len(prompt), *["nano@0"] * len(said)),
    )


def plain_step(learner: Learner, rows: Sequence[Row]) -> int:
    """The same step with every prefix read in every row; returns the tokens it read."""
    ordered = sorted(rows, key=lambda r: len(r.sample.token_ids))
    size = learner.settings.microbatch_rows
    num_tokens = 0
    learner.optimizer.zero_grad(set_to_none=True)
    for i in range(0, len(ordered), size):
        micro = Microbatch(rows=tuple(ordered[i : i + size]), prefix_length=0)
        seen = token_streams(micro)
        loss = cispo_loss(
            trained_logprobs(learner.model, micro),
            seen.sampler_logp_N,
            seen.advantage_N,
            seen.norm_N,
            weight_max=learner.settings.weight_max,
        )
        torch.autograd.backward(loss)
        num_tokens += micro.num_tokens
    learner.optimizer.step()
    return num_tokens


def measure(num_groups: int, num_desks: int, minibatches: int) -> dict[str, float]:
    groups = make_groups(num_groups, num_desks)
    learner = Learner(
        random_model(read_config(Settings().model_dir)), TrainSettings(minibatches=minibatches)
    )
    batches = split_minibatches(groups, minibatches)
    ledger_tokens = sum(len(s.token_ids) for g in groups for s in g.samples)
    trained = sum(g.num_trained for g in groups)
    learner.train_minibatch(batches[0])
    begin, cpu_begin = time.perf_counter(), time.process_time()
    steps: list[StepRecord] = [learner.train_minibatch(rows) for rows in batches]
    shared_s, shared_cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    begin, cpu_begin = time.perf_counter(), time.process_time()
    plain_tokens = sum(plain_step(learner, rows) for rows in batches)
    plain_s, plain_cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    model_tokens = sum(s.num_tokens for s in steps)
    micros = [m for rows in batches for m in pack_microbatches(rows, 32)]
    return {
        "groups": num_groups,
        "desks": num_desks,
        "minibatches": minibatches,
        "threads": torch.get_num_threads(),
        "microbatches": len(micros),
        "seconds": round(shared_s, 3),
        "model_tokens_per_s": round(model_tokens / shared_s),
        "ledger_tokens_per_s": round(ledger_tokens / shared_s),
        "trained_tokens_per_s": round(trained / shared_s),
        "plain_seconds": round(plain_s, 3),
        "plain_tokens_per_s": round(plain_tokens / plain_s),
        "model_tokens_per_cpu_s": round(model_tokens / shared_cpu_s),
        "plain_tokens_per_cpu_s": round(plain_tokens / plain_cpu_s),
        "cpu_saved_by_sharing": round(plain_cpu_s / shared_cpu_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--desks", type=int, default=1)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(measure(args.groups, args.desks, args.minibatches), indent=1))


if __name__ == "__main__":
    main()
