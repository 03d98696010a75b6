"""Every Triton kernel compiles for an H100/H200 (sm_90) without a GPU, in registers alone.

One child process without the interpreter compiles all of CASES (this file run as a script). To add
a kernel, add its launches to CASES: each argument is a type ("*bf16/16": a pointer divisible by 16,
"i32", "i64/16", "tensordesc<bf16[64, 128]>"), or the value of a constexpr or an absent pointer.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    module: str
    kernel: str
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    error: str = ""
    registers: int = 0
    local_bytes: int = 0
    """Bytes a thread keeps in local memory: what the registers could not hold."""
    shared_bytes: int = 0


def decode_case(dtype: str, head_dim: int, block_v: int, num_warps: int, silu: bool) -> Case:
    pointers = ("q_BHD", "k_BHD", "v_BHD", "o_BHD")
    strides = [f"{name}_{dim}" for name in "qkvo" for dim in ("row", "head")]
    return Case(
        name=f"decode-{dtype}-D{head_dim}-V{block_v}-w{num_warps}" + ("-silu" if silu else ""),
        module="m1serve.kernels.decode",
        kernel="_decode",
        num_warps=num_warps,
        arguments={
            **dict.fromkeys(pointers, f"*{dtype}/16"),
            "slope_H": "*fp32/16",
            "pool_SHDD": "*fp32/16",
            "slot_B": "*i64/16",
            **dict.fromkeys(strides, "i32/16"),
            "pool_slot": "i32/16",
            "num_slots": "i32",
            "SILU": silu,
            "D": head_dim,
            "BLOCK_V": block_v,
        },
    )


def decode_hopper_case(dtype: str, slot: str, silu: bool, ahead: bool) -> Case:
    strides = [f"{name}_{dim}" for name in "qkvo" for dim in ("row", "head")]
    return Case(
        name=f"decode_hopper-{dtype}-{slot}"
        + ("-silu" if silu else "")
        + ("-ahead" if ahead else ""),
        module="m1serve.kernels.decode_hopper",
        kernel="decode_kernel",
        num_warps=8,
        max_registers=64,
        arguments={
            **dict.fromkeys(("Q", "K", "V_IN", "O"), f"*{dtype}/16"),
            **dict.fromkeys(("SLOPE", "POOL"), "*fp32/16"),
            "SLOT": f"*{slot}/16",
            **dict.fromkeys((*strides, "pool_slot"), "i32/16"),
            "num_slots": "i32",
            "SILU": silu,
            "D": 128,
            "V": 64,
            "W": 8,
            "AHEAD": ahead,
        },
    )


def norm_case(kernel: str, dtype: str, inner: int, block_i: int, num_warps: int) -> Case:
    rows = ("dy_TI", "x_TI", "gate_TI", "y_TI", "dx_TI", "dgate_TI", "weight_I")
    return Case(
        name=f"norm{kernel}-{dtype}-{inner}",
        module="m1serve.kernels.norm_triton",
        kernel=kernel,
        num_warps=num_warps,
        arguments={
            **dict.fromkeys(rows, f"*{dtype}/16"),
            **dict.fromkeys(("r_T", "dweight_PI"), "*fp32/16"),
            **dict.fromkeys(("x_row", "gate_row"), "i32/16"),
            "num_inner": "i32" if inner % 16 else "i32/16",
            **dict.fromkeys(("num_tokens", "run"), "i32"),
            "eps": "fp32",
            "BLOCK_I": block_i,
            "WAIT": True,
        },
    )


def logprobs_case(kernel: str, out_dtype: str, target_dtype: str) -> Case:
    strides = ("stride_row", "stride_logits", "stride_out")
    return Case(
        name=f"logprobs-{kernel}-{out_dtype}-{target_dtype}",
        module="m1serve.kernels.logprobs_triton",
        kernel=f"logprobs_{kernel}_kernel",
        arguments={
            **dict.fromkeys(("logits", "running", "rows"), "*fp32/16"),
            "target": f"*{target_dtype}/16",
            "out": f"*{out_dtype}/16",
            **dict.fromkeys(("start", "num_columns", *strides), "i32/16"),
            "BLOCK_C": 2048,
        },
    )


WALK_STRIDES = tuple(f"{name}_{dim}" for name in "qkvo" for dim in ("token", "head"))
POOL_STRIDES = tuple(
    f"{pool}_{dim}" for pool in ("src", "dst") for dim in ("slot", "head", "k", "v")
)
TABLES = {
    **dict.fromkeys(("SRC", "DST", "SLOPE", "LOCAL", "START"), "*fp32/16"),
    **dict.fromkeys(("ITEM", "RUN", "CHAIN"), "*i64/16"),
}


def walk_case(kernel: str, dtype: str, head_dim: int, reverse: bool) -> Case:
    """As `walk.walk` and `walk.segment_starts` launch them."""
    is_bf16 = dtype == "bf16"
    is_run = kernel == "run_kernel"
    block_t, block_v = (32, min(head_dim, 64)) if is_bf16 else (16, 32)
    if is_run:
        block_t, block_v = (64, head_dim) if is_bf16 else (32, min(head_dim, 64))
    return Case(
        name=f"{kernel}-{dtype}-D{head_dim}" + ("-reverse" if reverse else ""),
        module="m1serve.kernels.walk",
        kernel=kernel,
        num_warps=8 if kernel == "walk_kernel" or block_v == 128 else 4,
        arguments={
            **TABLES,
            **dict.fromkeys("QKVO", f"*{dtype}/16"),
            **dict.fromkeys((*WALK_STRIDES, *POOL_STRIDES), "i32/16"),
            "H": 8,
            "D": head_dim,
            "BLOCK_V": block_v,
            "BLOCK_T": block_t,
            "BLOCK_K": 8,
            "BF16": is_bf16,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            "REVERSE": reverse,
            "STAGES": 3 if is_bf16 else 1,
        },
    )


def hopper_case(columns: int, stages: int, reverse: bool) -> Case:
    tile = "tensordesc<bf16[64, {}],NVMMASharedLayout(128, 16, 2)>"
    return Case(
        name=f"hopper-{columns}" + ("-reverse" if reverse else ""),
        module="m1serve.kernels.walk_hopper",
        kernel="walk_kernel",
        arguments={
            **TABLES,
            **dict.fromkeys(("q_desc", "k_desc"), tile.format(128)),
            **dict.fromkeys(("v_desc", "o_desc"), tile.format(columns)),
            "O": "*bf16/16",
            **dict.fromkeys((*WALK_STRIDES, *POOL_STRIDES), "i32/16"),
            "H": 64,
            "V": columns,
            "STAGES": stages,
            "REVERSE": reverse,
        },
    )


def attend_case(is_causal: bool, takes_turns: bool) -> Case:
    tile = "tensordesc<bf16[{}, 128],NVMMASharedLayout(128, 16, 2)>"
    return Case(
        name="attend" + ("-causal" if is_causal else "") + ("-turns" if takes_turns else ""),
        module="m1serve.kernels.softmax_hopper",
        kernel="attend_kernel",
        arguments={
            **dict.fromkeys(("q_desc", "o_desc"), tile.format(64)),
            **dict.fromkeys(("k_desc", "v_desc"), tile.format(128)),
            "LSE": "*fp32/16",
            **dict.fromkeys(("num_queries", "num_keys"), "i32"),
            **dict.fromkeys(("q_head", "k_head", "v_head"), "i32/16"),
            **dict.fromkeys(("k_row", "v_row"), "i32"),
            "H": 64,
            "K": 8,
            "CAUSAL": is_causal,
            "TURNS": takes_turns,
        },
    )


def experts_case(kernel: str, num_tokens: int, is_even: bool, by_pick: bool) -> Case:
    """As `moe_decode.expert_picks` launches them; the widths below are its `tile_of`."""
    block_b, stages = {1: (16, 5), 128: (32, 4), 256: (64, 3)}[num_tokens]
    return Case(
        name=f"experts-{kernel}-{num_tokens}" + ("" if is_even else "-odd"),
        module="m1serve.kernels.moe_decode",
        kernel=kernel,
        num_stages=stages,
        arguments={
            **dict.fromkeys(("x_NE", "w13_X2FE", "w2_XEF", "z_MF", "y_ME"), "*bf16/16"),
            "weight_M": "*fp32/16",
            "chosen_M": "*i64/16",
            **dict.fromkeys(("num_hidden", "num_inner"), "i32/16"),
            **dict.fromkeys(("num_picks", "num_experts", "num_chosen"), "i32"),
            "AHEAD": 16,
            "EVEN": is_even,
            "BY_PICK": by_pick,
            "BLOCK_M": 2 * num_tokens,
            "BLOCK_B": block_b,
            "ROWS": 64,
            "DEPTH": 128,
            "CHUNK": 64,
            "WAIT": True,
        },
    )


def single_case(kernel: str) -> Case:
    """As `moe_single.one_token_picks` launches them."""
    return Case(
        name=f"experts-{kernel}",
        module="m1serve.kernels.moe_single",
        kernel=kernel,
        num_stages=5,
        arguments={
            **dict.fromkeys(("x_1E", "w13_X2FE", "w2_XEF", "z_PF", "y_PE"), "*bf16/16"),
            "logits_1X": "*fp32/16",
            **dict.fromkeys(("num_hidden", "num_inner", "num_experts"), "i32/16"),
            "AHEAD": 16,
            "EVEN": True,
            "P": 2,
            "BLOCK_P": 2,
            "BLOCK_X": 32,
            "BLOCK_B": 16,
            "ROWS": 64,
            "DEPTH": 128,
            "WAIT": True,
        },
    )


def residual_case(kernel: str, dtype: str, terms: int, inner: int, block_i: int) -> Case:
    """As `residual_triton` launches them: several terms lie at places, and their sum is kept."""
    rows = ("residual_NE", "y_ME", "weight_E", "sum_NE", "normed_NE", "out_NE", "h_M2F", "z_MF")
    return Case(
        name=f"residual-{kernel}-{dtype}-{terms}-{inner}",
        module="m1serve.kernels.residual_triton",
        kernel=kernel,
        num_warps=4 if kernel == "swiglu_kernel" else max(4, block_i // 1024),
        arguments={
            **dict.fromkeys(rows, f"*{dtype}/16"),
            "place_M": "*i64/16",
            "weight_M": "*fp32/16",
            **dict.fromkeys(("num_hidden", "num_inner"), "i32" if inner % 16 else "i32/16"),
            "num_picks": "i32",
            **dict.fromkeys(("alpha", "beta", "eps"), "fp32"),
            "TERMS": terms,
            "PLACED": terms > 1,
            "KEEPS": terms > 1,
            "AHEAD": terms < 2,
            "BLOCK_I": block_i,
            "ROWS": 4,
            "COLUMNS": 1024,
            "WAIT": True,
        },
    )


def router_case(kernel: str, dtype: str, tokens: int) -> Case:
    return Case(
        name=f"router-{kernel}-{dtype}-{tokens}",
        module="m1serve.kernels.router_triton",
        kernel=kernel,
        num_warps=16 if kernel == "logits_kernel" else 1,
        arguments={
            "x_NE": f"*{dtype}/16",
            **dict.fromkeys(("gate_XE", "logits_NX", "weight_NP", "p_NX"), "*fp32/16"),
            "chosen_NP": "*i64/16",
            **dict.fromkeys(("num_hidden", "num_experts"), "i32/16"),
            "num_tokens": "i32",
            "R": tokens,
            "DEPTH": 8192,
            "P": 2,
            "BLOCK_P": 2,
            "BLOCK_X": 32,
            "WAIT": True,
        },
    )


def linear_case(num_tokens: int, *num_rows: int, num_stages: int, out_dtype: str = "bf16") -> Case:
    """As `linear_triton.multiply` launches them; widths and stages are its `tile_of`."""
    total = sum(num_rows)
    rows, depth = (64, 128) if total > 16384 else (32, 256) if total > 4096 else (16, 256)
    weights = {}
    for place in range(3):
        is_here = place < len(num_rows)
        weights[f"w{place}_OE"] = "*bf16/16" if is_here else None
        weights[f"out{place}_NO"] = f"*{out_dtype}/16" if is_here else None
        weights[f"num_out{place}"] = "i32/16"
    return Case(
        name=f"linear-{out_dtype}-{num_tokens}-{'-'.join(map(str, num_rows))}",
        module="m1serve.kernels.linear_triton",
        kernel="linear_kernel",
        num_stages=num_stages,
        arguments={
            **weights,
            "x_NE": "*bf16/16",
            "num_tokens": "i32",
            "num_in": "i32/16",
            "COUNT": len(num_rows),
            "AHEAD": 1024 // rows,
            "EVEN": total != 1024,
            "BLOCK_B": num_tokens,
            "ROWS": rows,
            "DEPTH": depth,
            "WAIT": True,
        },
    )


def rotary_case(dtype: str) -> Case:
    strides = [f"{name}_{dim}" for name in "qk" for dim in ("row", "head")]
    return Case(
        name=f"rotary-{dtype}",
        module="m1serve.kernels.rotary_triton",
        kernel="rotary_kernel",
        arguments={
            **dict.fromkeys(("q_NHD", "k_NKD"), f"*{dtype}/16"),
            **dict.fromkeys(("cos_NR", "sin_NR"), "*fp32/16"),
            **dict.fromkeys((*strides, "num_pairs"), "i32/16"),
            **dict.fromkeys(("num_heads", "num_kv_heads", "num_positions"), "i32"),
            "BLOCK_H": 64,
            "BLOCK_K": 8,
            "BLOCK_R": 32,
            "WAIT": True,
        },
    )


def paged_case(dtype: str, head_dim: int, num_kv_heads: int, page_tokens: int) -> Case:
    """As `paged_triton.decode` launches it; the widths are its `tiling`."""
    is_fp32 = dtype == "fp32"
    block_n = 32 if is_fp32 or head_dim > 128 else 64
    strides = ("q_row", "q_head", "key_page", "value_page")
    return Case(
        name=f"paged-{dtype}-K{num_kv_heads}-D{head_dim}-S{page_tokens}",
        module="m1serve.kernels.paged_triton",
        kernel="split_kernel",
        num_stages=2 if is_fp32 else 3,
        arguments={
            **dict.fromkeys(("q_BHD", "key_PKSD", "value_PKSD"), f"*{dtype}/16"),
            **dict.fromkeys(("part_BHCD", "lse_BHC"), "*fp32/16"),
            "page_BM": "*i32/16",
            "length_B": "*i64/16",
            **dict.fromkeys(strides, "i32/16"),
            **dict.fromkeys(("num_rows", "num_pages", "max_tokens", "num_splits"), "i32"),
            **dict.fromkeys(("num_group", "page_row"), "i32"),
            "scale": "fp32",
            "K": num_kv_heads,
            "S": page_tokens,
            "D": head_dim,
            "BLOCK_G": 16,
            "BLOCK_B": 128,
            "BLOCK_N": block_n,
            "MIN_TILES": 2,
            "PRECISION": "ieee" if is_fp32 else "tf32",
            "WAIT": True,
        },
    )


def join_case(dtype: str, head_dim: int) -> Case:
    return Case(
        name=f"paged-join-{dtype}-D{head_dim}",
        module="m1serve.kernels.paged_triton",
        kernel="join_kernel",
        arguments={
            **dict.fromkeys(("part_BHCD", "lse_BHC"), "*fp32/16"),
            "o_BHD": f"*{dtype}/16",
            "length_B": "*i64/16",
            **dict.fromkeys(("max_tokens", "num_splits"), "i32"),
            **dict.fromkeys(("o_row", "o_head"), "i32/16"),
            "H": 64,
            "D": head_dim,
            "BLOCK_N": 64,
            "BLOCK_C": 32,
            "MIN_TILES": 2,
            "WAIT": True,
        },
    )


def page_copy_case(kernel: str, dtype: str, index: str) -> Case:
    """As `paged_copy_triton` launches them."""
    strides = ("key_page", "value_page", "pool_page", "k_row", "k_head", "v_row", "v_head")
    pointers = ("key_PKSD", "value_PKSD", "k_NKD", "v_NKD", "pool_PKSD", "out_KLD")
    return Case(
        name=f"{kernel}-{dtype}-{index}",
        module="m1serve.kernels.paged_copy_triton",
        kernel=kernel,
        arguments={
            **dict.fromkeys(pointers, f"*{dtype}/16"),
            **dict.fromkeys(("page_N", "offset_N", "page_M"), f"*{index}/16"),
            **dict.fromkeys(strides, "i32/16"),
            **dict.fromkeys(("num_pages", "num_tokens"), "i32"),
            "K": 8,
            "S": 64,
            "D": 128,
            "BLOCK_K": 8,
            "BLOCK_L": 64,
            "WAIT": True,
        },
    )


def softmax_join_case(dtype: str, head_dim: int) -> Case:
    strides = [f"{part}_{dim}" for part in "ab" for dim in ("row", "head", "lse_head", "lse_row")]
    return Case(
        name=f"softmax-join-{dtype}-{head_dim}",
        module="m1serve.kernels.softmax_triton",
        kernel="join_parts_kernel",
        arguments={
            **dict.fromkeys(("a_THD", "b_THD"), f"*{dtype}/16"),
            **dict.fromkeys(("a_lse_HT", "b_lse_HT"), "*fp32/16"),
            **dict.fromkeys(strides, "i32/16"),
            "num_tokens": "i32",
            "D": head_dim,
            "BLOCK_D": 1 << (head_dim - 1).bit_length(),
            "BLOCK_T": 16,
            "WAIT": True,
        },
    )


CASES = [
    softmax_join_case("bf16", 128),
    softmax_join_case("fp16", 40),
    paged_case("bf16", 128, 8, 64),
    paged_case("bf16", 128, 8, 16),
    paged_case("bf16", 128, 8, 256),
    paged_case("fp16", 256, 2, 16),
    paged_case("bf16", 16, 2, 16),
    paged_case("fp32", 128, 8, 64),
    paged_case("fp32", 32, 2, 16),
    join_case("bf16", 128),
    join_case("fp32", 256),
    page_copy_case("store_kernel", "bf16", "i64"),
    page_copy_case("store_kernel", "fp32", "i32"),
    page_copy_case("gather_kernel", "bf16", "i64"),
    page_copy_case("gather_kernel", "fp32", "i32"),
    logprobs_case("fold", "fp32", "i64"),
    logprobs_case("differentiate", "bf16", "i64"),
    logprobs_case("differentiate", "fp32", "i32"),
    attend_case(True, True),
    attend_case(False, True),
    attend_case(True, False),
    attend_case(False, False),
    hopper_case(64, 4, False),
    hopper_case(64, 4, True),
    hopper_case(128, 3, False),
    hopper_case(128, 3, True),
    walk_case("walk_kernel", "bf16", 128, False),
    walk_case("walk_kernel", "bf16", 32, True),
    walk_case("walk_kernel", "fp16", 64, False),
    walk_case("walk_kernel", "fp16", 128, False),
    walk_case("walk_kernel", "fp32", 32, False),
    walk_case("walk_kernel", "fp32", 128, True),
    walk_case("run_kernel", "bf16", 128, False),
    walk_case("run_kernel", "bf16", 128, True),
    walk_case("run_kernel", "fp32", 64, False),
    walk_case("chain_kernel", "bf16", 128, False),
    decode_case("bf16", 128, 64, 8, True),
    decode_case("fp32", 128, 64, 8, False),
    decode_case("fp16", 64, 64, 8, True),
    decode_case("bf16", 32, 32, 8, True),
    decode_hopper_case("bf16", "i64", True, True),
    decode_hopper_case("bf16", "i32", True, False),
    decode_hopper_case("fp32", "i32", False, True),
    norm_case("_forward", "bf16", 8192, 8192, 8),
    norm_case("_backward", "bf16", 8192, 8192, 32),
    norm_case("_forward", "fp32", 8192, 8192, 8),
    norm_case("_backward", "fp32", 8192, 8192, 32),
    norm_case("_forward", "fp32", 1000, 1024, 4),
    norm_case("_backward", "fp32", 1000, 1024, 4),
    experts_case("up_kernel", 1, True, True),
    experts_case("up_kernel", 128, True, False),
    experts_case("up_kernel", 256, True, False),
    experts_case("up_kernel", 256, False, False),
    experts_case("down_kernel", 1, True, True),
    experts_case("down_kernel", 1, False, True),
    experts_case("down_kernel", 256, True, False),
    linear_case(16, 24576, 8192, num_stages=5),
    linear_case(64, 200064, num_stages=3, out_dtype="fp32"),
    linear_case(16, 8192, 1024, 1024, num_stages=5),
    linear_case(16, 6144, num_stages=5),
    linear_case(64, 6144, num_stages=3),
    linear_case(16, 1024, num_stages=7),
    linear_case(64, 1024, num_stages=3),
    single_case("up_one_kernel"),
    single_case("down_one_kernel"),
    rotary_case("bf16"),
    router_case("logits_kernel", "bf16", 1),
    router_case("logits_kernel", "bf16", 2),
    router_case("logits_kernel", "fp32", 2),
    router_case("choice_kernel", "bf16", 1),
    residual_case("norm_kernel", "bf16", 0, 6144, 8192),
    residual_case("norm_kernel", "bf16", 1, 6144, 8192),
    residual_case("norm_kernel", "bf16", 2, 6144, 8192),
    residual_case("norm_kernel", "fp32", 2, 16384, 16384),
    residual_case("norm_kernel", "fp32", 1, 1001, 1024),
    residual_case("picks_kernel", "bf16", 2, 6144, 8192),
    residual_case("swiglu_kernel", "bf16", 0, 9216, 0),
    residual_case("swiglu_kernel", "fp32", 0, 1001, 0),
]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Build]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: nothing can be compiled")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return {name: Build(**build) for name, build in json.loads(done.stdout).items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_kernel_compiles_for_sm_90_without_spilling(
    builds: dict[str, Build], name: str
) -> None:
    build = builds[name]
    assert build.error == ""
    assert build.local_bytes == 0, f"spills: {build}"
    assert build.shared_bytes <= MAX_SHARED_BYTES, build
    assert 0 < build.registers <= 255


def build_case(case: Case) -> Build:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    short = "NVMMASharedLayout(128, 16, 2)"
    layout = repr(gl.NVMMASharedLayout(128, 16, 2))
    signature, constants, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = case.arguments[name]
        if kernel.params[place].is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name], _, divisor = value.replace(short, layout).partition("/")
        if divisor:
            divisible[(place,)] = [["tt.divisibility", int(divisor)]]
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    if kernel.is_gluon():
        constants = {(kernel.arg_names.index(name),): v for name, v in constants.items()}
    built = triton.compile(
        source(kernel, signature, constants, divisible),
        target=GPUTarget("cuda", 90, 32),
        options={
            "num_warps": case.num_warps,
            "num_stages": case.num_stages,
            "maxnreg": case.max_registers,
            "enable_fp_fusion": True,
        },
    )
    usage = resource_usage(built.asm["cubin"])
    return Build(
        registers=usage["REG"],
        local_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=built.metadata.shared,
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL, ... of a cubin's only kernel, in the words of cuobjdump."""
    import triton.backends.nvidia as backend

    tool = Path(backend.__path__[0]) / "bin" / "cuobjdump"
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    said = subprocess.run(
        [tool, "-res-usage", path], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", said)}


def main() -> None:
    builds: dict[str, Build] = {}
    for case in CASES:
        try:
            builds[case.name] = build_case(case)
        # one kernel that does not compile must not hide the others
        except Exception as error:  # noqa: BLE001
            builds[case.name] = Build(error=f"{type(error).__name__}: {error}")
    sys.stdout.write(json.dumps({name: dataclasses.asdict(b) for name, b in builds.items()}))


if __name__ == "__main__":
    main()
