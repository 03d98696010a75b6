"""Where kernel tests run: compiled on a GPU, else in Triton's interpreter, made exact in bf16.

The interpreter must be chosen before triton is first imported in the process. It proves indexing
and maths only: no races, no limits of shared memory or registers, dots are exact.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    import numpy as np

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = find_spec("triton") is not None
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """For tests of Triton kernels: the interpreter's tensors live on the CPU."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("no CUDA device")
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("with a CUDA device, kernels are compiled for it and not interpreted")
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Repairs what triton 3.6 to 3.9 interpret wrongly; a kernel jitted too early is an error."""
    import triton.language as tl
    from triton.runtime import interpreter as interp

    if not isinstance(tl.sum, interp.InterpretedFunction):
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set: see conftest.py")
    convert, create_dot = interp._convert_float, interp.InterpreterBuilder.create_dot
    patch_tensor = interp._patch_lang_tensor

    # fp32 -> bf16 truncates there, as no GPU does
    def rounding_convert(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return to_bf16_bits(data)
        converted: np.ndarray = convert(data, source, target, mode)
        return converted

    # it multiplies the bits of bf16 as integers (triton-lang/triton#11584)
    def float_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    # triton 3.6 with numpy >= 2.4: a loop bound of shape [1] has no index
    def index_patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interp._convert_float = rounding_convert
    interp.InterpreterBuilder.create_dot = float_dot
    interp._patch_lang_tensor = index_patched


def to_bf16_bits(data: np.ndarray) -> np.ndarray:
    """fp32 to the bits of the nearest bf16, ties to even, by torch."""
    import numpy as np

    nearest = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
    return nearest.view(torch.int16).numpy().view(np.uint16)
