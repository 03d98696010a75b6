"""The report's claims on cost beside what we compute, in sentences."""

from __future__ import annotations

from m1serve.cost.claim import Claim, Share
from m1serve.cost.report import PaperRl, Report
from m1serve.cost.rl import RlRun


def verdict(report: Report) -> list[str]:
    return [*claim_lines(report.claim), *rl_lines(report.paper_rl, report.question.run)]


def claim_lines(claim: Claim) -> list[str]:
    at = {share.num_tokens: share for share in claim.shares}
    half, claimed, end = at[65_536], at[100_000], at[131_072]
    equal = claim.equal_cost
    return [
        f"'Less than 50 % of R1's FLOPs at 64K': holds for whole generations in every reading, "
        f"{_shares(half)}.",
        f"'Approximately 25 % at 100K': not by its own figure, which says {claimed.figure:.0%} "
        f"there and {end.figure:.0%} at 128K. Ours: {_shares(claimed)}; the token at 100K alone "
        f"{claimed.token_expanded:.0%} ({claimed.token_absorbed:.0%}), {claimed.figure_token:.0%} "
        "by the figure.",
        "The figure's points fit sums with 8 softmax layers for M1 (it has 10), 61 layers with "
        "experts and 3 dense ones for R1 (58 and 3), and weighted sums over the whole square of "
        "attention: docs/cost.md. Its slopes are 1.2 to 1.5 times ours.",
        f"M1 costs more FLOPs than R1 up to a context of {equal.token_expanded:,.0f} "
        f"({equal.token_absorbed:,.0f} absorbed), and for whole generations up to "
        f"{equal.generation_expanded:,.0f} ({equal.generation_absorbed:,.0f}) tokens.",
    ]


def _shares(share: Share) -> str:
    return (
        f"{share.generation_expanded:.0%} with MLA expanded, {share.generation_absorbed:.0%} "
        f"absorbed, {share.figure:.0%} in the figure"
    )


def rl_lines(paper: PaperRl, run: RlRun) -> list[str]:
    stated = (
        f"Stated: 512 H800 for three weeks, {paper.stated_gpu_hours:,} GPU-hours, "
        f"{paper.stated_dollars:,} $: {paper.stated_dollars / paper.stated_gpu_hours:.2f} $ each."
    )
    if paper.share_of_stated is None or paper.rollouts_per_step_affordable is None:
        return [stated, "Not even one rollout of the run above fits on 8 of them."]
    cost = paper.computed
    busy = paper.computed_flops / paper.stated_peak_flops
    return [
        stated,
        f"The run above, for M1 on 8 x H800 a copy: {cost.gpu_hours:,.0f} GPU-hours "
        f"({cost.sampling_gpu_hours:,.0f} sampling, {cost.training_gpu_hours:,.0f} training), "
        f"{cost.dollars:,.0f} $, {paper.share_of_stated:.0%} of what is stated; its FLOPs are "
        f"{busy:.1%} of what the stated GPU-hours offer at their peak.",
        f"The stated GPU-hours would pay for {paper.rollouts_per_step_affordable:,.0f} such "
        f"rollouts a step instead of {run.group_size * run.prompts_per_step:,}.",
        "Why it differs: batch, group size and mean rollout length are not published, so ours are "
        "assumptions; and the roofline leaves out what keeps GPUs waiting (the longest rollout, "
        "scoring, weight transfer, failed runs).",
    ]
