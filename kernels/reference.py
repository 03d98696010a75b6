"""Lightning attention in plain torch: token by token (the definition) and in chunks (exact).

    S_t = exp(-s) S_{t-1} + k_t v_t^T        o_t = q_t S_t

Both are differentiable. All here compute in float64 when given float64, else in fp32, and are the
oracle of every other kernel.
Shapes: B rows, T tokens, H heads, D head dim (state: key dim x value dim), N chunks of C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.plan import Piece

CHUNK = 64


def lightning_recurrent(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, D] and the state after each row's first `count_B` tokens.

    The given state is not modified.
    """
    q_BTHD, k_BTHD, v_BTHD = (_exact(t) for t in (q_BTHD, k_BTHD, v_BTHD))
    s_BHDD = _start(q_BTHD, state_BHDD)
    decay_H11 = torch.exp(-slope_H.to(q_BTHD.dtype)).view(-1, 1, 1)
    outputs = []
    for t in range(q_BTHD.shape[1]):
        grown_BHDD = s_BHDD * decay_H11 + k_BTHD[:, t, :, :, None] * v_BTHD[:, t, :, None, :]
        if count_B is not None:
            grown_BHDD = torch.where((t < count_B).view(-1, 1, 1, 1), grown_BHDD, s_BHDD)
        s_BHDD = grown_BHDD
        outputs.append((q_BTHD[:, t, :, None, :] @ s_BHDD).squeeze(-2))
    return torch.stack(outputs, 1), s_BHDD


def lightning_chunked(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor | None = None,
    count_B: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `lightning_recurrent`, in chunks. Outputs past a row's count mean nothing."""
    B, T, H, D = q_BTHD.shape
    C = min(chunk, T)
    N = -(-T // C)
    q_BHNCD, k_BHNCD, v_BHNCD = (_in_chunks(_exact(t), N, C) for t in (q_BTHD, k_BTHD, v_BTHD))
    s_BHDD = _start(q_BHNCD, state_BHDD)
    rate_H11 = slope_H.to(q_BHNCD.dtype).view(H, 1, 1)
    i_C = torch.arange(1, C + 1, device=q_BTHD.device, dtype=q_BHNCD.dtype)
    gap_CC = i_C[:, None] - i_C
    intra_HCC = torch.where(gap_CC >= 0, torch.exp(-rate_H11 * gap_CC.clamp(min=0)), 0.0)
    o_BHNCD = ((q_BHNCD @ k_BHNCD.transpose(-1, -2)) * intra_HCC[:, None]) @ v_BHNCD

    # b: B, or 1 when every row has all T tokens
    total_b = i_C.new_full((1,), T) if count_B is None else count_B.to(i_C.dtype)
    starts_N = C * torch.arange(N, device=q_BTHD.device, dtype=i_C.dtype)
    real_bN = (total_b[:, None] - starts_N).clamp(0, C)
    left_b1NC = (real_bN[..., None] - i_C)[:, None]
    to_end_bHNC = torch.where(
        left_b1NC >= 0, torch.exp(-rate_H11[None] * left_b1NC.clamp(min=0)), 0.0
    )
    added_BHNDD = (k_BHNCD * to_end_bHNC[..., None]).transpose(-1, -2) @ v_BHNCD
    kept_bHN = torch.exp(-rate_H11.view(1, H, 1) * real_bN[:, None])
    before = []
    for n in range(N):
        before.append(s_BHDD)
        s_BHDD = s_BHDD * kept_bHN[:, :, n, None, None] + added_BHNDD[:, :, n]
    from_start_H1C1 = torch.exp(-rate_H11 * i_C[:, None]).unsqueeze(1)
    o_BHNCD = o_BHNCD + (q_BHNCD * from_start_H1C1) @ torch.stack(before, 2)
    return o_BHNCD.reshape(B, H, N * C, D)[:, :, :T].transpose(1, 2), s_BHDD


def lightning_step_(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor,
    count_B: Tensor | None = None,
) -> Tensor:
    """Outputs [B, H, D] of one token a row.

    `state_BHDD` is updated in place, except in rows whose count is 0.
    """
    # not state * exp(-s): one rounded factor, taken thousands of times, drifts
    loss_bH11 = -torch.expm1(-slope_H.to(state_BHDD.dtype)).view(1, -1, 1, 1)
    k_BHD1 = k_BHD.unsqueeze(-1)
    if count_B is not None:
        is_real_B111 = count_B.view(-1, 1, 1, 1) > 0
        loss_bH11 = loss_bH11 * is_real_B111
        k_BHD1 = k_BHD1 * is_real_B111
    change_BHDD = (k_BHD1 * v_BHD.unsqueeze(-2)).addcmul_(state_BHDD, loss_bH11, value=-1)
    state_BHDD.add_(change_BHDD)
    return (q_BHD.unsqueeze(-2) @ state_BHDD).squeeze(-2)


def lightning_decode_pool(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    pool_SHDD: Tensor,
    slot_B: Tensor,
    *,
    silu: bool = False,
) -> Tensor:
    """`lightning_step_` on slots of a pool, outputs in q's dtype; negative slots give zeros."""
    if silu:
        q_BHD, k_BHD, v_BHD = (F.silu(t) for t in (q_BHD, k_BHD, v_BHD))
    o_BHD = torch.zeros_like(q_BHD, memory_format=torch.contiguous_format)
    rows = (slot_B >= 0).nonzero().squeeze(1)
    slots = slot_B[rows].long()
    state_RHDD = pool_SHDD[slots]
    q_RHD, k_RHD, v_RHD = (_exact(t[rows]) for t in (q_BHD, k_BHD, v_BHD))
    o_BHD[rows] = lightning_step_(q_RHD, k_RHD, v_RHD, slope_H, state_RHDD).to(q_BHD.dtype)
    pool_SHDD[slots] = state_RHDD
    return o_BHD


def walk_pieces(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    pieces: tuple[Piece, ...],
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> None:
    """What `prefill.run_pieces` does, in torch: one piece after the other."""
    for piece in pieces:
        span = slice(piece.row, piece.row + piece.num_tokens)
        q, k, v = (
            t[None, span].flip(1) if reverse else t[None, span] for t in (q_THD, k_THD, v_THD)
        )
        has_source = source_SHDD is not None and piece.source >= 0
        before = source_SHDD[piece.source][None] if has_source and source_SHDD is not None else None
        if piece.num_tokens:
            o, after = lightning_chunked(q, k, v, slope_H, before)
            o_THD[span] = o[0].flip(0) if reverse else o[0]
        else:
            after = _start(_exact(q_THD)[None], before)
        if target_SHDD is not None and piece.target >= 0:
            target_SHDD[piece.target] = after[0]


def _exact(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _start(like: Tensor, state_BHDD: Tensor | None) -> Tensor:
    if state_BHDD is not None:
        return state_BHDD.to(like.dtype)
    B, D = like.shape[0], like.shape[-1]
    H = like.shape[1] if like.dim() == 5 else like.shape[2]
    return like.new_zeros(B, H, D, D)


def _in_chunks(t_BTHD: Tensor, num_chunks: int, chunk: int) -> Tensor:
    B, T, H, D = t_BTHD.shape
    t_BHTD = t_BTHD.transpose(1, 2)
    if num_chunks * chunk != T:
        t_BHTD = F.pad(t_BHTD, (0, 0, 0, num_chunks * chunk - T))
    return t_BHTD.reshape(B, H, num_chunks, chunk, D)
