"""What distributed transformer layers send and keep, against the arithmetic of their schemes; random numbers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import smp
from smp import runtime
from smp.comm import collectives
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.tp.transformer_twin import setup
from tests.tp.twins import tp_group

H, S, N = 32, 16, 4
SIZES = {"num_attention_heads": 4, "attention_head_size": 8, "hidden_size": H, "intermediate_size": 4 * H}
NO_DROPOUT = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PRE = {"pre_layernorm": True, "post_layernorm": False}
PARALLEL = {**PRE, "parallel_attention": True}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Elements that this rank sends, by collective: of rings, which send least."""
    sent: Counter[str] = Counter()
    size = tp_group().size

    def wrap(name, elements):
        plain = getattr(collectives, name)

        def call(tensor, *args, **kwargs):
            sent[counted_as.get(name, name)] += elements(tensor.numel())
            return plain(tensor, *args, **kwargs)

        return plain, call

    kinds = {
        "all_reduce": lambda n: 2 * n * (size - 1) // size,
        "start_all_reduce": lambda n: 2 * n * (size - 1) // size,
        "all_gather": lambda n: n * (size - 1),
        "reduce_scatter": lambda n: n * (size - 1) // size,
        "all_to_all": lambda n: n * (size - 1) // size,
    }
    counted_as = {"start_all_gather": "all_gather", "start_reduce_scatter": "reduce_scatter"}
    kinds |= {name: kinds[other] for name, other in counted_as.items()}
    wrapped = {name: wrap(name, elements) for name, elements in kinds.items()}
    # One is made of the other: what it sends is counted once.
    wrapped["all_reduce"] = (collectives.all_reduce, lambda x, *a, **k: collectives.start_all_reduce(x, *a, **k)())
    for name, (_, call) in wrapped.items():
        setattr(collectives, name, call)
    try:
        yield sent
    finally:
        for name, (plain, _) in wrapped.items():
            setattr(collectives, name, plain)


def sent_by_one_layer(prescaled: bool, optimize: str, **options) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward: what three layers send beyond what two send."""
    results = []
    for num_layers in (2, 3):
        setup(tp_group().size if runtime.is_initialized() else smp.size(), prescaled, optimize)
        module = smp.nn.DistributedTransformer(num_layers, **SIZES, **NO_DROPOUT, **options)
        x = torch.randn(N, S, H, requires_grad=True)
        with counted() as forward:
            loss = module((x, torch.zeros(N, 1, 1, S)))[0].square().sum()
        with counted() as backward:
            loss.backward()
        results.append((forward, backward))
    return tuple(more - less for less, more in zip(*results))  # type: ignore[return-value]


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2, 4])
@on_ranks(lambda a: a["tp"])
def test_speed_sends_two_all_reduces_forward_and_two_backward(tp, prescaled):
    """Of the hidden states that a layer works on, and nothing else; one forward where attention and MLP are parallel,
    one backward too where they read one norm."""
    setup(tp, prescaled, "speed")
    hidden = (N if prescaled else tp * N) * S * H
    one = 2 * hidden * (tp - 1) // tp
    for options, forward, backward in [
        (PRE, 2, 2),
        ({}, 2, 2),
        (PARALLEL, 1, 2),
        ({**PARALLEL, "single_pre_layernorm": True}, 1, 1),
    ]:
        sent = sent_by_one_layer(prescaled, "speed", **options)
        assert sent == ({"start_all_reduce": forward * one}, {"start_all_reduce": backward * one}), options
    runtime.reset()


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2, 4])
@on_ranks(lambda a: a["tp"])
def test_memory_gathers_and_scatters_and_gathers_inputs_again(tp, prescaled):
    """Forward as many bytes as all-reduces would send; backward half as many more, for the inputs that are not kept."""
    setup(tp, prescaled, "memory")
    hidden = (N if prescaled else tp * N) * S * H
    half = hidden * (tp - 1) // tp
    # Gradients of norms and of biases that every rank has whole, where each rank saw its places only.
    whole = {"start_all_reduce": 2 * (2 * 3 * H) * (tp - 1) // tp} if prescaled else {}
    sent = sent_by_one_layer(prescaled, "memory", **PRE)
    assert sent[0] == {"all_gather": 2 * half, "reduce_scatter": 2 * half}
    assert sent[1] == {"all_gather": 4 * half, "reduce_scatter": 2 * half, **whole}
    # Where attention and MLP read one norm they gather it once, and their outputs are scattered together.
    whole = {"start_all_reduce": 2 * (4 * H) * (tp - 1) // tp} if prescaled else {}
    sent = sent_by_one_layer(prescaled, "memory", **PARALLEL, single_pre_layernorm=True)
    assert sent[0] == {"all_gather": half, "reduce_scatter": half}
    assert sent[1] == {"all_gather": 3 * half, "reduce_scatter": half, **whole}
    runtime.reset()


def kept_bytes(tp: int, prescaled: bool, optimize: str) -> int:
    """What one rank keeps for the backward of a transformer, on the same batch of the whole group for every tp."""
    setup(tp, prescaled, optimize)
    module = smp.nn.DistributedTransformer(4, **SIZES, **NO_DROPOUT, **PRE, causal_mask_size=S)
    parameters = {param.untyped_storage()._cdata for param in module.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes(), tensor  # held, so that no other one takes its place
        return tensor

    x = torch.randn(N if prescaled else N // tp, S, H, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module((x, None))[0]
    out.sum().backward()
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@on_ranks(4)
def test_memory_mode_keeps_a_part_of_every_activation(prescaled):
    """1 / tp of what one process keeps, to a hundredth; `speed` keeps hidden states on every rank."""
    one = kept_bytes(1, prescaled, "memory")
    for tp in (2, 4):
        assert kept_bytes(tp, prescaled, "memory") == pytest.approx(one / tp, rel=0.01)
        assert kept_bytes(tp, prescaled, "speed") > 1.2 * one / tp
    runtime.reset()


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@on_ranks(4)
def test_whole_parameters_cannot_drift_apart(optimize):
    """PITFALLS a1-2: every rank computes their gradients, a little differently, and all still hold the same weights."""
    for prescaled in (False, True):
        setup(2, prescaled, optimize)
        model = smp.DistributedModel(smp.nn.DistributedTransformer(1, **SIZES, **NO_DROPOUT, **PRE))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        noise = torch.Generator().manual_seed(smp.rank())
        for param in model.parameters():
            param.register_hook(lambda grad, noise=noise: grad + 1e-6 * torch.randn(grad.shape, generator=noise))
        for step in range(20):
            part = smp.rdp_rank() if prescaled else smp.rank()
            x = torch.randn(N, S, H, generator=torch.Generator().manual_seed(100 * step + part))
            optimizer.zero_grad()
            model((x, None))[0].square().mean().backward()
            optimizer.step()
        for name, param in model.local_named_parameters():
            kind = smp.CommGroup.DP_GROUP if spec_of(param) is None else smp.CommGroup.RDP_GROUP
            for other in collectives.all_gather(param.detach().unsqueeze(0), runtime.get().group(kind)):
                assert torch.equal(other, param), name
    runtime.reset()


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@on_ranks(2)
def test_what_one_rank_is_given_and_another_is_not_is_an_error_at_once(optimize):
    """Joined batches: ranks would wait for each other in different messages, or take one argument for another."""
    setup(2, prescaled=False, optimize=optimize)
    layer = smp.nn.DistributedTransformerLayer(**SIZES, **NO_DROPOUT)
    mask = torch.zeros(N, 1, 1, S) if smp.tp_rank() == 0 else None
    with pytest.raises(smp.SmpError, match="given attention_mask"):
        layer((torch.randn(N, S, H), mask))
    head = smp.nn.DistributedTransformerLMHead(1, **SIZES, vocab_size=8, num_positions=S, num_token_types=2)
    ids = torch.zeros(N, S, dtype=torch.long)
    types, positions = (ids, None) if smp.tp_rank() == 0 else (None, ids)
    with pytest.raises(smp.SmpError, match="given token_type_ids.*given position_ids"):
        head((ids, None, types, positions, None))
    head((ids, None, ids, ids, None))
