"""The shapes that MiniMax-M1 is compared with: DeepSeek-R1 under both readings of MLA, Qwen3-235B.

MLA caches one latent vector a token. Expanded, it is turned into the keys and values of every head,
which are cached as the reference code does; absorbed, queries attend to the latents themselves,
which is what servers decode with: 3.4 times the FLOPs a key, 71 times less cache. Prefill is
expanded in both.
"""

from __future__ import annotations

from dataclasses import replace

from m1serve.cost.shape import Shape, Storage

R1_LAYERS, R1_DENSE_LAYERS, R1_HEADS, R1_HIDDEN, R1_VOCAB = 61, 3, 128, 7168, 129_280
R1_NOPE, R1_ROPE, R1_V, R1_Q_RANK, R1_KV_RANK = 128, 64, 128, 1536, 512
R1_DENSE, R1_EXPERT, R1_EXPERTS, R1_TOP, R1_SHARED = 18_432, 2048, 256, 8, 1
R1_QK = R1_NOPE + R1_ROPE

QWEN_LAYERS, QWEN_HEADS, QWEN_KV_HEADS, QWEN_D, QWEN_HIDDEN = 94, 64, 4, 128, 4096
QWEN_EXPERT, QWEN_EXPERTS, QWEN_TOP, QWEN_VOCAB = 1536, 128, 8, 151_936


def r1_attention_params() -> int:
    """Of one layer: queries through their rank, the latent and its expansion, the output."""
    queries = R1_HIDDEN * R1_Q_RANK + R1_Q_RANK * R1_HEADS * R1_QK
    latent = R1_HIDDEN * (R1_KV_RANK + R1_ROPE) + R1_KV_RANK * R1_HEADS * (R1_NOPE + R1_V)
    return queries + latent + R1_HEADS * R1_V * R1_HIDDEN


def qwen_attention_params() -> int:
    queries_and_output = 2 * QWEN_HIDDEN * QWEN_HEADS * QWEN_D
    return queries_and_output + 2 * QWEN_HIDDEN * QWEN_KV_HEADS * QWEN_D


def r1_expanded(storage: Storage) -> Shape:
    moe_layers = R1_LAYERS - R1_DENSE_LAYERS
    dense, expert = 3 * R1_HIDDEN * R1_DENSE, 3 * R1_HIDDEN * R1_EXPERT
    router, head = R1_HIDDEN * R1_EXPERTS, R1_VOCAB * R1_HIDDEN
    always = R1_LAYERS * r1_attention_params() + R1_DENSE_LAYERS * dense
    always += moe_layers * (R1_SHARED * expert + router)
    norms = R1_LAYERS * (2 * R1_HIDDEN + R1_Q_RANK + R1_KV_RANK) + R1_HIDDEN
    num_params = always + moe_layers * R1_EXPERTS * expert + norms + 2 * head
    return Shape(
        name="DeepSeek-R1 expanded",
        body_flops=2 * (always + moe_layers * R1_TOP * expert),
        head_flops=2 * head,
        decode_state_flops=0,
        prefill_state_flops=0,
        decode_key_flops=R1_LAYERS * R1_HEADS * 2 * (R1_QK + R1_V),
        prefill_key_flops=R1_LAYERS * R1_HEADS * 2 * (R1_QK + R1_V),
        num_params=num_params,
        weight_bytes=num_params * storage.weight_itemsize,
        embedding_bytes=head * storage.weight_itemsize,
        num_expert_layers=moe_layers,
        num_experts=R1_EXPERTS,
        num_experts_per_tok=R1_TOP,
        expert_bytes=expert * storage.weight_itemsize,
        state_bytes=0,
        kv_token_bytes=R1_LAYERS * R1_HEADS * (R1_QK + R1_V) * storage.kv_itemsize,
    )


def r1_absorbed(storage: Storage) -> Shape:
    latent = R1_KV_RANK + R1_ROPE
    return replace(
        r1_expanded(storage),
        name="DeepSeek-R1 absorbed",
        decode_key_flops=R1_LAYERS * R1_HEADS * 2 * (latent + R1_KV_RANK),
        kv_token_bytes=R1_LAYERS * latent * storage.kv_itemsize,
    )


def qwen3(storage: Storage) -> Shape:
    expert, head = 3 * QWEN_HIDDEN * QWEN_EXPERT, QWEN_VOCAB * QWEN_HIDDEN
    always = QWEN_LAYERS * (qwen_attention_params() + QWEN_HIDDEN * QWEN_EXPERTS)
    norms = QWEN_LAYERS * (2 * QWEN_HIDDEN + 2 * QWEN_D) + QWEN_HIDDEN
    num_params = always + QWEN_LAYERS * QWEN_EXPERTS * expert + norms + 2 * head
    key_flops = QWEN_LAYERS * 4 * QWEN_HEADS * QWEN_D
    return Shape(
        name="Qwen3-235B-A22B",
        body_flops=2 * (always + QWEN_LAYERS * QWEN_TOP * expert),
        head_flops=2 * head,
        decode_state_flops=0,
        prefill_state_flops=0,
        decode_key_flops=key_flops,
        prefill_key_flops=key_flops,
        num_params=num_params,
        weight_bytes=num_params * storage.weight_itemsize,
        embedding_bytes=head * storage.weight_itemsize,
        num_expert_layers=QWEN_LAYERS,
        num_experts=QWEN_EXPERTS,
        num_experts_per_tok=QWEN_TOP,
        expert_bytes=expert * storage.weight_itemsize,
        state_bytes=0,
        kv_token_bytes=QWEN_LAYERS * 2 * QWEN_KV_HEADS * QWEN_D * storage.kv_itemsize,
    )
