"""Every comparison with float64 on a GPU, at M1's sizes: the checks section of the benchmark."""

from __future__ import annotations

import pytest
import torch

from m1serve.kernels.benchmark.checks import CheckCase, Setting
from m1serve.kernels.benchmark.run import all_checks

CASES = list(all_checks(Setting())) if torch.cuda.is_available() else []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.op}, {case.case}, {case.dtype_name}" for case in CASES]
)
def test_kernels_are_as_exact_as_promised(case: CheckCase) -> None:
    error = case.run()
    torch.cuda.empty_cache()
    assert error <= case.bar
