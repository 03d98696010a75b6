"""One attention kernel from rest and right behind a second of matrix products; needs a Hopper GPU.

    python benchmarks/attention_power.py --out benchmarks/results/attention-power-h200.json

A chip at its power limit lowers its clock, so a kernel's rate depends on what ran before it.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch

from m1serve.kernels.softmax_hopper import attend

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 32 * 1024, 64, 8, 128
FLOPS = 4 * HEADS * HEAD_DIM * TOKENS * TOKENS / 2
REST_S, PRODUCTS, IN_A_ROW, REPEATS = 0.5, 900, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    q_THD = torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    shape = (2, TOKENS, KV_HEADS, HEAD_DIM)
    k_TKD, v_TKD = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(8192, 8192, device="cuda").bfloat16()

    def rates(count: int) -> list[float]:
        """TFLOP/s of so many calls in a row."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            attend(q_THD, k_TKD, v_TKD, is_causal=True)
            mark.record()
        torch.cuda.synchronize()
        times = [x.elapsed_time(y) for x, y in pairwise(marks)]
        return [round(FLOPS / ms / 1e9, 1) for ms in times]

    rates(1)
    from_rest, behind = [], []
    for _ in range(IN_A_ROW):
        time.sleep(REST_S)
        from_rest += rates(1)
    for _ in range(REPEATS):
        for _ in range(PRODUCTS):
            a @ a
        behind.append(rates(IN_A_ROW))
    result = {
        "command": f"python benchmarks/attention_power.py --out {out}",
        "device": torch.cuda.get_device_name(),
        "what": "TFLOP/s of causal attention, 32K tokens, 64 heads of 128, 8 kv heads, bf16",
        "from_rest": from_rest,
        "behind_a_second_of_products": behind,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
