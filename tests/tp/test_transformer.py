"""Distributed transformer layers against a layer on whole weights: outputs, gradients of inputs and parameters."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import smp
from smp import runtime
from smp.errors import StepError
from tests.harness import on_ranks
from tests.tp.transformer_twin import Twin, assert_equals_twin, setup, whole_weights

SIZES = {"num_attention_heads": 4, "attention_head_size": 6, "hidden_size": 16, "intermediate_size": 20}
NO_DROPOUT = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PRE = {"pre_layernorm": True, "post_layernorm": False}
N, S = 2, 8

LAYERS = {
    "post": {},
    "pre": PRE,
    "both": {"pre_layernorm": True},
    "causal": {**PRE, "causal_mask_size": 16, "activation": "gelu_new"},
    "gptj": {
        **{**PRE, "causal_mask_size": 16, "parallel_attention": True, "single_pre_layernorm": True},
        **{"rotary_dim": 4, "rotary_interleaved": True, "use_qkv_bias": False, "use_attention_dense_bias": False},
    },
    "neox": {**PRE, "causal_mask_size": 16, "parallel_attention": True, "rotary_dim": 2},
    "llama": {
        **{**PRE, "causal_mask_size": 16, "rotary_dim": 6, "num_key_value_heads": 4, "norm": "rms", "gated_mlp": True},
        **{"activation": "silu", "use_qkv_bias": False, "use_attention_dense_bias": False, "use_mlp_bias": False},
    },
    "no_norm_bias": {**PRE, "norm_bias": False, "activation": "quick_gelu"},
}


# One rank knows no modes; two see each of them, and four the ones that differ in everything.
GRID = [
    (1, False, "speed"),
    *((2, prescaled, optimize) for prescaled in (False, True) for optimize in ("speed", "memory")),
    *((4, False, "speed"), (4, True, "memory")),
]


def grid(test):
    """Every degree, kind of batch and way to communicate."""
    names = [f"{tp}-{'prescaled' if prescaled else 'joined'}-{optimize}" for tp, prescaled, optimize in GRID]
    return pytest.mark.parametrize(("tp", "prescaled", "optimize"), GRID, ids=names)(test)


def on_tp(**options):
    return on_ranks(lambda a: a["tp"], **options)


def padding(generator: torch.Generator, num_keys: int = S) -> torch.Tensor:
    """Additive [N, 1, 1, num_keys], another number of places masked in each row."""
    lengths = torch.randint(num_keys // 2, num_keys + 1, (N, 1, 1, 1), generator=generator)
    return torch.zeros(N, 1, 1, num_keys).masked_fill(torch.arange(num_keys) >= lengths, -10000.0)


def hidden(generator: torch.Generator, length: int = S) -> torch.Tensor:
    return torch.randn(N, length, SIZES["hidden_size"], generator=generator)


@pytest.mark.parametrize("kind", LAYERS)
@grid
@on_tp()
def test_layer_equals_its_twin(tp, prescaled, optimize, kind):
    """With a mask for padding, whose gradient is right too."""
    setup(tp, prescaled, optimize)
    options = {**SIZES, **LAYERS[kind]}
    assert_equals_twin(
        lambda: smp.nn.DistributedTransformerLayer(**options, **NO_DROPOUT),
        lambda g: (hidden(g), padding(g)),
        lambda module, x: module(x)[0],
        lambda w, x: Twin(w, **options).layer(*x),
    )
    runtime.reset()


@pytest.mark.parametrize("kind", ["post", "pre"])
@grid
@on_tp()
def test_layer_with_cross_attention_equals_its_twin(tp, prescaled, optimize, kind):
    """An encoder's states of another length, which divides and which does not; both masks."""
    for length in (4, 5):
        setup(tp, prescaled, optimize)
        options = {**SIZES, **LAYERS[kind], "causal_mask_size": 16}

        def twin(w, x, options=options):
            return Twin(w, **options).layer(x[0], x[2], cross=x[1], cross_mask=x[3])

        assert_equals_twin(
            lambda options=options: smp.nn.DistributedTransformerLayer(
                **options, **NO_DROPOUT, add_cross_attention=True
            ),
            lambda g, length=length: (hidden(g), hidden(g, length), padding(g), padding(g, length)),
            lambda module, x: module(x)[0],
            twin,
        )
    runtime.reset()


@pytest.mark.parametrize("gated", [False, True])
@grid
@on_tp()
def test_output_layer_equals_its_twin(tp, prescaled, optimize, gated):
    """Used alone; every activation."""
    for activation in ("gelu", "gelu_new", "relu", "silu", "quick_gelu"):
        setup(tp, prescaled, optimize)
        options = {**SIZES, "activation": activation, "gated_mlp": gated, "pre_layernorm": True}

        def twin(w, x, options=options):
            layer = Twin(w, **options)
            return layer.around(x[0], "", layer.mlp)

        assert_equals_twin(
            lambda activation=activation: smp.nn.DistributedTransformerOutputLayer(
                16, 20, 0.0, activation, pre_layernorm=True, gated_mlp=gated
            ),
            lambda g: (hidden(g),),
            lambda module, x: module(x[0]),
            twin,
        )
    runtime.reset()


def stacked(options, num_layers=3, **each):
    """The twin of a transformer."""

    def run(w, x, mask=None, cross=None, cross_mask=None, ids=None):
        for index in range(num_layers):
            own = {name: values[index] for name, values in each.items()}
            layer = Twin(w, **{**options, "layer_idx": index, **own})
            x = layer.layer(x, mask, f"seq_layers.{index}.", cross, cross_mask, ids)
        return x

    return run


@grid
@on_tp()
def test_transformer_equals_its_twin(tp, prescaled, optimize):
    """Layers in a row inside of one region: scores scaled by the layer's number, other windows in each layer."""
    setup(tp, prescaled, optimize)
    options = {**SIZES, **PRE, "causal_mask_size": 16, "scale_attn_by_layer_idx": True}
    assert_equals_twin(
        lambda: smp.nn.DistributedTransformer(3, **options, **NO_DROPOUT, attention_window=[None, 2, 5]),
        lambda g: (hidden(g), padding(g)),
        lambda module, x: module(x)[0],
        lambda w, x: stacked(options, attention_window=[None, 2, 5])(w, *x),
    )
    runtime.reset()


@grid
@on_tp()
def test_transformer_with_cross_attention_and_positions_equals_its_twin(tp, prescaled, optimize):
    """All that passes along the layers: the encoder's states, which get a gradient from each, masks, positions."""
    setup(tp, prescaled, optimize)
    options = {**SIZES, "causal_mask_size": 16, "rotary_dim": 4}
    assert_equals_twin(
        lambda: smp.nn.DistributedTransformer(3, **options, **NO_DROPOUT, add_cross_attention=True),
        lambda g: (hidden(g), hidden(g, 4), padding(g), padding(g, 4), torch.randint(50, (N, S), generator=g)),
        lambda module, x: module(x[:4], x[4])[0],
        lambda w, x: stacked(options)(w, x[0], x[2], x[1], x[3], x[4]),
    )
    runtime.reset()


@grid
@on_tp()
def test_sequences_that_do_not_divide_are_right(tp, prescaled, optimize):
    """They are kept whole where a batch that all share would be cut along them."""
    setup(tp, prescaled, optimize)
    options = {**SIZES, **PRE, "parallel_attention": True, "single_pre_layernorm": True}
    assert_equals_twin(
        lambda: smp.nn.DistributedTransformer(3, **options, **NO_DROPOUT),
        lambda g: (hidden(g, 7), None),
        lambda module, x: module(x)[0],
        lambda w, x: stacked(options)(w, *x),
    )
    runtime.reset()


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
@on_ranks(2, launcher=lambda a: a["launcher"])
def test_single_precision_and_process_groups(launcher):
    """At the precision that users train with; under torchrun messages go over gloo."""
    for prescaled in (False, True):
        for optimize in ("speed", "memory"):
            setup(2, prescaled, optimize)
            options = {**SIZES, **LAYERS["causal"], "rotary_dim": 4}
            assert_equals_twin(
                lambda options=options: smp.nn.DistributedTransformer(2, **options, **NO_DROPOUT),
                lambda g: (hidden(g), padding(g)),
                lambda module, x: module(x)[0],
                lambda w, x, options=options: stacked(options, 2)(w, *x),
                dtype=torch.float32,
                tolerance=1e-5,
            )
    runtime.reset()


@on_ranks(2)
def test_what_comes_back_is_the_tuple_that_was_given():
    """With the same masks, so that layers of the user's own can follow."""
    for prescaled in (False, True):
        for optimize in ("speed", "memory"):
            setup(2, prescaled, optimize)
            x, mask, ids = torch.randn(N, S, 16), torch.zeros(N, 1, 1, S), torch.randn(N, 4, 16)
            for module in (
                smp.nn.DistributedTransformerLayer(**SIZES, **NO_DROPOUT),
                smp.nn.DistributedTransformer(2, **SIZES, **NO_DROPOUT),
            ):
                out = module((x, mask))
                assert type(out) is tuple
                assert out[0].shape == x.shape
                assert out[1] is mask
            with_cross = smp.nn.DistributedTransformerLayer(**SIZES, **NO_DROPOUT, add_cross_attention=True)
            out = with_cross((x, ids, mask, None))
            assert len(out) == 4
            assert out[1] is ids
            assert out[2] is mask
            assert out[3] is None
    runtime.reset()


@on_ranks(2)
def test_ranks_with_batches_of_other_shapes_are_refused():
    """In both ways to communicate, on both ranks, with both shapes in the message."""
    for optimize in ("speed", "memory"):
        setup(2, False, optimize)
        layer = smp.nn.DistributedTransformerLayer(**SIZES, **NO_DROPOUT)
        with pytest.raises(StepError, match="same shape"):
            layer((torch.randn(N, S + smp.tp_rank(), 16), None))
    runtime.reset()


@on_ranks(2)
def test_initial_values_are_those_of_one_process():
    """q, k and v start as three linears; normal values and zeros where asked for; ranks seeded differently agree."""
    setup(2, False, "speed")
    torch.manual_seed(1 + smp.tp_rank())
    make = smp.nn.DistributedTransformerLayer
    w = whole_weights(make(**SIZES))
    bound = 1 / 4
    for name, size in [("attention.qkv", 72), ("output.dense1", 20)]:
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        assert weight.shape == (size, 16)
        assert 0.9 * bound < float(weight.abs().max()) <= bound
        assert 0.5 * bound < float(bias.abs().max()) <= bound
    assert w["attention.layernorm.weight"].eq(1).all()
    w = whole_weights(make(**SIZES, use_normal_initialization=True, initializer_range=0.5))
    assert 0.45 < float(w["attention.qkv.weight"].std()) < 0.55
    assert w["attention.qkv.bias"].eq(0).all()
    layer = make(**SIZES, **PRE, **NO_DROPOUT, zero_init=True)
    x = torch.randn(N, S, 16)
    assert torch.equal(layer((x, None))[0], x)
    runtime.reset()


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2)
def test_layer_follows_its_twin_under_autocast_and_in_half_precision(prescaled, optimize):
    """bf16: sums of 24 and 20 terms and two norms; each of about ten roundings of 2^-9 grows at most fourfold."""
    for autocast in (True, False):
        setup(2, prescaled, optimize)
        dtype = torch.float32 if autocast else torch.bfloat16
        layer = smp.nn.DistributedTransformerLayer(**SIZES, **LAYERS["causal"], **NO_DROPOUT).to(dtype)
        weights = {name: w.double() for name, w in whole_weights(layer).items()}
        generator = torch.Generator().manual_seed(1 + (0 if prescaled else smp.tp_rank()))
        x = hidden(generator).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layer((x, padding(generator)))[0]
        assert out.dtype == dtype
        theirs = x.detach().double().requires_grad_()
        generator = torch.Generator().manual_seed(1 + (0 if prescaled else smp.tp_rank()))
        hidden(generator)
        want = Twin(weights, **SIZES, **LAYERS["causal"]).layer(theirs, padding(generator).double())
        out.float().square().mean().backward()
        want.square().mean().backward()
        for got, expected in [(out, want), (x.grad, theirs.grad)]:
            assert float((got.double() - expected).norm() / expected.norm()) < 40 * 2.0**-9
        assert all(param.grad is not None and param.grad.dtype == dtype for param in layer.parameters())
    runtime.reset()


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@on_ranks(2)
def test_shapes_without_data_come_out_right(optimize):
    """Other stages and the tracer run a layer on fake tensors: on one rank alone, nothing is sent."""
    for prescaled in (False, True):
        setup(2, prescaled, optimize)
        options = {**SIZES, **LAYERS["causal"], "rotary_dim": 4, "use_alibi": True, "attention_in_fp32": True}
        with smp.delay_param_initialization():
            module = smp.nn.DistributedTransformer(2, **options)
        if smp.tp_rank() == 0:
            for mode, device in ((FakeTensorMode(allow_non_fake_inputs=True), "cpu"), (nullcontext(), "meta")):
                with mode:
                    x = torch.empty(N, S, 16, device=device, requires_grad=True)
                    real = module if device == "meta" else smp.nn.DistributedTransformerLayer(**options)
                    out = real((x, torch.zeros(N, 1, 1, S, device=device)))[0]
                    assert out.shape == x.shape
                    out.sum().backward()
                    assert x.grad.shape == x.shape
    runtime.reset()


@on_ranks(4)
def test_delayed_parameters_have_the_same_values_on_every_degree():
    """Of the whole model, though no rank has had it at any time."""
    made = []
    for tp in (1, 2, 4):
        setup(tp, False, "memory")
        torch.manual_seed(5)
        with smp.delay_param_initialization():
            module = smp.nn.DistributedTransformer(2, **SIZES, **LAYERS["llama"])
        assert all(param.is_meta for param in module.parameters())
        made.append(whole_weights(smp.DistributedModel(module).module))
    for weights in made[1:]:
        assert all(torch.equal(weight, made[0][name]) for name, weight in weights.items())
    runtime.reset()


@pytest.mark.parametrize("tp", [2, 4])
@on_tp()
def test_state_dict_holds_whole_tensors(tp):
    """The parts of fused matrices go to their sections."""
    setup(tp, False, "memory")
    module = smp.nn.DistributedTransformer(2, **SIZES, **LAYERS["llama"])
    weights = whole_weights(module)
    model = smp.DistributedModel(module)
    state = model.state_dict()
    assert set(state) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(state[name], weight)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    model.load_state_dict({**state, "_smp_is_partial": False})
    for name, weight in whole_weights(module).items():
        assert torch.equal(state[name], weight)
    runtime.reset()
