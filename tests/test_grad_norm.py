"""Clipping by the norm of the whole model's gradient, whoever calls it."""

import copy
import math

import pytest
import torch
from torch import nn

import smp
from smp import grad_norm, runtime
from smp.errors import UsageError
from tests.dp.helpers import assert_close, batch, chain, loss_of, make_reducer, my_part
from tests.harness import on_ranks
from tests.standin import free, install_model, layers, shard

CLIP = {"smp": smp.clip_grad_norm_, "torch": nn.utils.clip_grad_norm_}


def fill_gradients(module: nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) * scale


def spread(module: nn.Module, stages: list[list[int]], cut: dict[str, int]) -> list[nn.Parameter]:
    """Leaves this rank's stage and tensor-parallel part of `module`; returns its parameters."""
    rt = runtime.get()
    mine = [name for name, _ in module.named_parameters() if int(name.split(".")[0]) in stages[rt.pp_rank]]
    for name, param in module.named_parameters():
        if name not in mine:
            free(param)
        elif name in cut:
            shard(param, cut[name])
    return install_model(module, mine).local_parameters()


@pytest.mark.parametrize("caller", ["smp", "torch"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@on_ranks(4, config={"ddp": True, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
def test_norm_and_clipped_gradients_are_those_of_one_process(caller: str, norm_type: float) -> None:
    """A failure means a norm of one rank's part, or one that counts whole parameters once per rank."""
    grad_norm.intercept_torch()
    for scale, max_norm in ((1.0, 0.5), (1e-4, 0.5), (1e4, 0.5)):
        reference = layers()
        fill_gradients(reference, scale)
        module = copy.deepcopy(reference)
        for param, expected in zip(module.parameters(), reference.parameters()):
            param.grad = expected.grad.clone()
        cut = {"0.weight": 0, "1.weight": 1, "1.bias": 0, "3.weight": 0}
        params = spread(module, [[0, 1, 2], [3]], cut)
        expected_norm = nn.utils.clip_grad_norm_(list(reference.parameters()), max_norm, norm_type)
        norm = CLIP[caller](params, max_norm, norm_type)
        assert_close(norm, expected_norm)
        for (name, param), whole in zip(module.named_parameters(), reference.parameters()):
            if param.grad is not None:
                spec = getattr(param, "_smp_shard", None)
                assert_close(param.grad, whole.grad if spec is None else spec.split(whole.grad), name)


@on_ranks(4, config={"ddp": True, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
def test_every_element_counts_once() -> None:
    """a5-3 without ties. A failure means a norm that grows with the number of ranks."""
    module = layers(dtype=torch.float32)
    num_elements = sum(param.numel() for param in module.parameters())
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    params = spread(module, [[0, 1], [2, 3]], {"0.weight": 0, "2.weight": 1, "2.bias": 0})
    entries = [(param, param.grad) for param in params]
    norm = grad_norm.global_norm(runtime.get(), entries)
    assert norm.dtype == torch.float32
    assert norm.item() ** 2 == pytest.approx(num_elements, rel=1e-6)
    assert grad_norm.global_norm(runtime.get(), entries, math.inf) == 1.0


@pytest.mark.parametrize("caller", ["smp", "torch"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_stage_without_parameters_takes_part(caller: str, norm_type: float) -> None:
    """A failure means a hang, as the other stages wait for one that has nothing to clip."""
    grad_norm.intercept_torch()
    module = layers()
    fill_gradients(module, 1.0)
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in module.parameters()]), norm_type)
    params = spread(module, [[0, 1, 2, 3], []], {})
    norm = CLIP[caller](params, 0.5, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("caller", ["smp", "torch"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(4, config={"ddp": True, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
def test_a_stage_of_which_nothing_is_split_takes_part(caller: str, norm_type: float) -> None:
    """A failure means an error on the tensor-parallel ranks whose parameters another one counts."""
    grad_norm.intercept_torch()
    module = layers()
    fill_gradients(module, 1.0)
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in module.parameters()]), norm_type)
    params = spread(module, [[0, 1], [2, 3]], {"0.weight": 0})
    norm = CLIP[caller](params, 0.5, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_a_nan_on_one_rank_is_seen_on_all(norm_type: float) -> None:
    """A failure means that one stage skips or scales where another does not."""
    module = layers()
    fill_gradients(module, 1.0)
    module[3].weight.grad[0, 0] = math.nan
    params = spread(module, [[0, 1], [2, 3]], {})
    assert torch.isnan(grad_norm.global_norm(runtime.get(), [(p, p.grad) for p in params], norm_type))
    with pytest.raises(RuntimeError, match="non-finite|nan"):
        smp.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_half_precision_norms_do_not_overflow() -> None:
    """A failure means an infinite norm, and gradients scaled to nothing, for an ordinary large model."""
    module = layers(dtype=torch.float16)
    for param in module.parameters():
        param.grad = torch.full_like(param, 30000.0)
    params = spread(module, [[0, 1], [2, 3]], {})
    norm = smp.clip_grad_norm_(params, 1.0)
    assert float(norm) == pytest.approx(30000.0 * math.sqrt(4 * 72), rel=1e-6)
    assert all(param.grad.dtype == torch.float16 and (param.grad > 0).all() for param in params)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_gradients_of_other_modules_are_not_mixed_in() -> None:
    """A failure means that clipping something else waits for all ranks, or that a mixture gets a meaningless norm."""
    grad_norm.intercept_torch()
    module, other = layers(), layers(1)
    fill_gradients(module, 1.0)
    fill_gradients(other, 1.0)
    params = spread(module, [[0, 1], [2, 3]], {})
    if runtime.get().rank == 0:  # on one rank only: nothing collective about it
        norm = nn.utils.clip_grad_norm_(other.parameters(), 1e9)
        assert_close(norm, torch.cat([p.grad.flatten() for p in other.parameters()]).norm())
    for clip in CLIP.values():
        with pytest.raises(UsageError, match="DistributedModel"):
            clip([*params, *other.parameters()], 1.0)


@pytest.mark.parametrize("caller", ["smp", "torch"])
@on_ranks(2, config={"ddp": True})
def test_clipping_ends_a_short_accumulation_window(caller: str) -> None:
    """A failure means that replicas clip by norms of their own gradients, and drift apart."""
    grad_norm.intercept_torch()
    model = chain()
    reference = copy.deepcopy(model)
    install_model(model).reducer = make_reducer(model, backward_passes_per_step=4)
    loss_of(model, my_part(batch(0, 4))).backward()
    loss_of(reference, batch(0, 4)).backward()
    expected = nn.utils.clip_grad_norm_(list(reference.parameters()), 1e-3)
    assert_close(CLIP[caller](model.parameters(), 1e-3), expected)
    for (name, param), whole in zip(model.named_parameters(), reference.parameters()):
        assert_close(param.grad, whole.grad, name)


@pytest.mark.parametrize("caller", CLIP)
@on_ranks(1, config={"ddp": True})
def test_a_norm_that_cannot_be_taken_in_parts_is_refused(caller: str) -> None:
    """torch takes norms of order 0 and below. A failure means that a script meets an error that is not smp's own."""
    grad_norm.intercept_torch()
    module = layers(1)
    fill_gradients(module, 1.0)
    params = install_model(module).local_parameters()
    with pytest.raises(UsageError, match="norm_type is 0"):
        CLIP[caller](params, 1.0, 0)


@on_ranks(1)
def test_without_smp_torch_clips_as_ever() -> None:
    """A failure means that the interception disturbs programs that do not use smp."""
    grad_norm.intercept_torch()
    grad_norm.intercept_torch()
    module = layers(1)
    fill_gradients(module, 1.0)
    expected = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert_close(nn.utils.clip_grad_norm_(module.parameters(), 1e9), expected)
    assert_close(nn.utils.get_total_norm([p.grad for p in module.parameters()]), expected)


@on_ranks(2, config={"pipeline_parallel_degree": 2})
def test_gradients_of_another_model_are_clipped_before_the_first_step_too() -> None:
    """Nothing is known of the stages then, and nothing has to be."""
    model = smp.DistributedModel(nn.Linear(2, 2))
    assert not model.partitioned
    other = nn.Linear(2, 2).double()
    fill_gradients(other, 1.0)
    want = torch.stack([param.grad.square().sum() for param in other.parameters()]).sum().sqrt()
    assert_close(nn.utils.clip_grad_norm_(other.parameters(), 1e9), want)
