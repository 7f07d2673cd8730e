"""Products by oneDNN give what torch's give, and everything else is torch's."""

import pytest
import torch
import torch.nn.functional as F

from smp import product


@pytest.fixture
def onednn(monkeypatch):
    """As on a machine where it is faster, with nothing too small for it."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(product, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(product, "SMALL", 0)


def arguments(dtype=torch.float32, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 8), (5, 8), (5,)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_(requires_grad) for s in shapes]


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_torch(onednn, with_bias, expanded):
    """Also for a gradient that is one number in all places, and inputs that lie in memory in another order."""
    results = []
    for function in (product.linear, F.linear):
        x, weight, bias = arguments()
        out = function(x.transpose(0, 1), weight, bias if with_bias else None)
        (out.sum() if expanded else (out * out).sum()).backward()
        results.append([out.detach(), x.grad, weight.grad, *([bias.grad] if with_bias else [])])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_slices_of_larger_matrices_are_multiplied(onednn):
    """A part of a fused weight has gaps in memory."""
    whole, x = torch.randn(6, 20), torch.randn(4, 7)
    weight = whole[1:5, 3:10]
    torch.testing.assert_close(product.times_transposed(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)
    wide = torch.randn(4, 3, 20)[..., 5:12]
    torch.testing.assert_close(product.times_transposed(wide, weight), wide @ weight.t(), rtol=1e-5, atol=1e-5)
    empty = torch.randn(0, 7)
    assert product.times_transposed(empty, weight).shape == (0, 4)


def test_what_does_not_need_a_gradient_gets_none(onednn):
    """A frozen weight costs no product."""
    x, weight, bias = arguments()
    weight.requires_grad_(False)
    product.linear(x, weight, bias).sum().backward()
    assert weight.grad is None and x.grad is not None and bias.grad is not None
    x, weight, _ = arguments(requires_grad=False)
    assert not product.linear(x, weight).requires_grad


def test_gradients_of_gradients_are_those_of_torch(onednn):
    """A gradient penalty; oneDNN's own product has no derivative."""
    results = []
    for function in (product.linear, F.linear):
        x, weight, bias = arguments()
        (inner,) = torch.autograd.grad(function(x, weight, bias).tanh().sum(), x, create_graph=True)
        inner.square().sum().backward()
        results.append([x.grad, weight.grad, bias.grad])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_other_dtypes_and_autocast_are_left_to_torch(onednn):
    """Double precision bit by bit, and the dtype that autocast asks for."""
    x, weight, bias = arguments(torch.float64)
    assert torch.equal(product.linear(x, weight, bias), F.linear(x, weight, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product.linear(*arguments()).dtype == torch.bfloat16


def test_what_stands_in_for_the_linear_function_is_called(onednn, monkeypatch):
    """A run that puts gradients of weights off has its own."""
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: "stand-in")
    assert product.linear(*arguments()) == "stand-in"


def test_processors_of_intel_keep_their_library(monkeypatch, tmp_path):
    """MKL is at least as fast there."""
    product.onednn_is_faster.cache_clear()
    try:
        monkeypatch.setattr(product, "CPU_INFO", tmp_path / "cpuinfo")
        assert not product.onednn_is_faster()
        product.onednn_is_faster.cache_clear()
        (tmp_path / "cpuinfo").write_text("vendor_id : GenuineIntel")
        assert not product.onednn_is_faster()
    finally:
        product.onednn_is_faster.cache_clear()
