"""Kernels called directly, as operators and inside compiled code: the same result; only operators need the compiler."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vitascope import kernels

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not on this system")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_norm_call():
    from vitascope.kernels.norm import layer_or_rms_norm

    tensors = [torch.randn(6, 64, device=DEVICE), torch.rand(64, device=DEVICE), torch.rand(64, device=DEVICE)]
    return layer_or_rms_norm, tensors, (1e-6, torch.float32)


def make_attention_call():
    from vitascope.kernels.short_attention import short_attention

    packed = torch.randn(2, 9, 3 * 2 * 32, device=DEVICE).bfloat16()
    weights = [torch.rand(32, device=DEVICE) + 0.5 for _ in range(2)]
    return short_attention, [packed, *weights], (None, 2, 1e-6)


def make_rotation_call():
    from vitascope.kernels.qk_norm_rope import qk_norm_rope

    _, tensors, rest = make_attention_call()
    return qk_norm_rope, tensors, rest


def make_mlp_call():
    from vitascope.kernels.relu2_mlp import relu2_mlp_with_hidden

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    shapes = ((8, 64), (128, 64), (128,), (64, 128), (64,))
    return relu2_mlp_with_hidden, [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes], ()


CALLS = pytest.mark.parametrize(
    "make_call",
    [make_norm_call, make_attention_call, make_rotation_call, make_mlp_call],
    ids=lambda make: make.__name__,
)


def run_forward_and_backward(function, tensors, rest) -> list[torch.Tensor]:
    """Return the first output and the gradients of all tensors."""
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*tensors, *rest)
    first = output[0] if isinstance(output, tuple) else output
    generator = torch.Generator(DEVICE).manual_seed(0)
    first.backward(torch.rand(first.shape, generator=generator, device=DEVICE).to(first.dtype))
    return [first.detach(), *(tensor.grad for tensor in tensors)]


@CALLS
def test_a_direct_call_is_the_operator(make_call) -> None:
    kernel, tensors, rest = make_call()
    direct, operator = (run_forward_and_backward(call, tensors, rest) for call in (kernel, kernel.operator))
    assert all(torch.equal(one, other) for one, other in zip(direct, operator, strict=True))
    with torch.no_grad():
        result = kernel(*tensors, *rest)
    assert torch.equal(result[0] if isinstance(result, tuple) else result, direct[0])


@pytest.mark.slow
@CALLS
def test_compiled_code_uses_the_operator(make_call, unchecked_shapes) -> None:
    kernel, tensors, rest = make_call()
    compiled = torch.compile(lambda *args: kernel(*args), backend="aot_eager", fullgraph=True)
    plain, traced = (run_forward_and_backward(call, tensors, rest) for call in (kernel, compiled))
    assert all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True))


@CALLS
def test_tensors_without_data_reach_the_operator(make_call, unchecked_shapes) -> None:
    """The compiler traces with such tensors; before PyTorch 2.12 it did not announce itself in backward passes."""
    kernel, tensors, rest = make_call()
    expected = kernel(*tensors, *rest)
    with FakeTensorMode() as mode:
        outputs = kernel(*map(mode.from_tensor, tensors), *rest)
    for output, real in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (outputs, expected)), strict=True
    ):
        assert (output.shape, output.dtype) == (real.shape, real.dtype)


def test_training_with_kernels_does_not_import_the_compiler() -> None:
    """Importing it takes seconds: the first call of an operator would."""
    code = """
import sys, torch
from tests.kernels.test_operator import make_attention_call, make_mlp_call, make_norm_call, run_forward_and_backward
for make_call in (make_attention_call, make_mlp_call, make_norm_call):
    run_forward_and_backward(*make_call())
assert "torch._dynamo" not in sys.modules
kernel, tensors, rest = make_norm_call()
kernel.operator(*tensors, *rest)
assert "torch._dynamo" in sys.modules, "this test proves nothing any more"
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
