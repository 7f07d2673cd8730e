"""What one microbatch costs, against arithmetic."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smp.pp.cost import ZERO, nominal_seconds
from smp.pp.trace import trace

CPU = torch.device("cpu")


def total_of(costs, table):
    return sum(table.values(), ZERO)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Head(nn.Module):
    """Embedding, two layers with a skip connection, a position table of its own, and a head."""

    def __init__(self, vocabulary=50, width=8):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(4, width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text):
        x = self.tokens(text) + self.position
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x)


def test_products_count_two_operations_for_each_multiplication():
    """The partition would be blind to what modules compute."""
    costs = trace(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3, bias=False)), (torch.zeros(5, 6),), {})
    assert costs["0"].flops == 2 * 5 * 6 * 10
    assert costs["1"].flops == 2 * 5 * 10 * 3
    assert costs.total.flops == costs["0"].flops + costs["1"].flops
    convolution = trace(nn.Conv2d(3, 4, 3, padding=1), (torch.zeros(2, 3, 8, 8),), {})
    assert convolution.total.flops == 2 * (2 * 8 * 8) * 4 * (3 * 3 * 3)


def test_attention_on_the_cpu_is_counted():
    """torch's own counter has no formula for the CPU kernel: attention would cost nothing."""
    q, k, v = (torch.zeros(2, 3, n, d, requires_grad=True) for n, d in ((7, 4), (9, 4), (9, 4)))

    class Square(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    costs = trace(Square(), (q, k, v), {})
    assert costs.total.flops == 2 * 3 * (2 * 7 * 9 * 4 + 2 * 7 * 9 * 4)
    assert trace(Attention(), (q, q, q), {}).total.flops == 2 * 3 * 2 * (2 * 7 * 7 * 4)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted(kind, gates):
    """An LSTM is one kernel on the CPU, for which torch has no formula either."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(6, 5)

        def forward(self, x):
            return self.layer(x)[0]

    costs = trace(First(), (torch.zeros(7, 3, 6),), {})
    assert costs["layer"].flops == 2 * (7 * 3) * gates * 5 * (6 + 5)
    assert costs["layer"].weight > 0


def test_a_gpt_has_the_operations_of_the_formula():
    """24 N h^2 for the products of a layer, 4 N s h for attention, 2 N h v for the head."""
    transformers = pytest.importorskip("transformers")
    n, h, s, v, layers = 2, 32, 16, 96, 3
    config = transformers.GPT2Config(n_layer=layers, n_embd=h, n_head=4, vocab_size=v, n_positions=s)
    text = torch.zeros(n, s, dtype=torch.long)
    costs = trace(transformers.GPT2LMHeadModel(config), (text,), {"labels": text})
    assert costs["transformer.h.0"].flops == 24 * n * s * h * h + 4 * n * s * s * h
    assert costs.total.flops == layers * costs["transformer.h.0"].flops + 2 * n * s * h * v


def test_bytes_of_parameters_activations_and_outputs():
    """Memory is 80 % of the default weight: it has to be what a stage really keeps."""
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    costs = trace(model, (torch.zeros(5, 6),), {})
    assert costs["0"].parameter_bytes == 4 * (60 + 10)
    assert costs["2"].parameter_bytes == 4 * (30 + 3)
    assert costs["0"].output_bytes == 4 * 50 and costs["2"].output_bytes == 4 * 15
    assert costs.shapes["0"] == ((5, 10),)
    # Kept: the input, and the result of the ReLU, which the second layer needs as well; then what a loss outside keeps.
    assert costs.total.activation_bytes == 4 * (30 + 50) + 4 * 15
    real = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: real.append(t) or t, lambda t: t):
        model(torch.zeros(5, 6))
    known = {p.data_ptr() for p in model.parameters()}
    kept = {t.data_ptr(): t.untyped_storage().nbytes() for t in real if t.data_ptr() not in known}
    assert sum(kept.values()) == costs.total.activation_bytes - 4 * 15


def test_a_shared_parameter_counts_once():
    """Tied weights would make the model look larger than it is."""
    model = Head()
    model.head.weight = model.tokens.weight
    costs = trace(model, (torch.zeros(2, 4, dtype=torch.long),), {})
    assert costs.total.parameter_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_everything_is_charged_to_modules_with_parameters_and_nothing_twice():
    """What the code around modules does has to be done by some stage; a cost left out makes a stage look lighter."""
    costs = trace(Head(), (torch.zeros(2, 4, dtype=torch.long),), {})
    assert set(costs.charged) == {"", "tokens", "up", "down", "head"}
    whole, charged = costs.total, total_of(costs, costs.charged)
    assert charged.forward == pytest.approx(whole.forward) and charged.backward == pytest.approx(whole.backward)
    assert charged.activation_bytes == whole.activation_bytes and charged.flops == whole.flops
    assert charged.parameter_bytes == whole.parameter_bytes
    # The residual addition after `down`, the GELU after `up`, the loss after `head`.
    assert costs.charged["down"].forward > costs["down"].forward
    assert costs.charged["up"].forward > costs["up"].forward
    assert costs.charged["head"].forward > costs["head"].forward
    assert costs.charged[""].seconds == 0 and costs.near == {"": "tokens"}  # the position table goes with the tokens


def test_a_lookup_is_cheap_and_a_head_dear():
    """Both have the same parameters; without this the automatic cut is no better than counting them."""
    costs = trace(Head(vocabulary=4096, width=64), (torch.zeros(8, 4, dtype=torch.long),), {})
    assert costs["tokens"].parameter_bytes == costs["head"].parameter_bytes
    assert costs["tokens"].flops == 0 and costs["head"].flops > 0
    assert costs["tokens"].forward < 0.05 * costs["head"].forward


def test_the_backward_of_a_product_is_as_many_products_as_operands_need_gradients():
    """Zero-bubble schedules move the `weight` part; frozen weights (adapters) have none."""
    x = torch.zeros(64, 256)
    first, second = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
    costs = trace(nn.Sequential(first, second), (x,), {})
    assert costs["0"].backward == pytest.approx(costs["0"].weight)  # nobody wants the gradient of the input
    assert costs["1"].backward == pytest.approx(costs["1"].forward + costs["1"].weight)
    assert costs["1"].weight > costs["1"].forward  # the product, and the sum over microbatches
    second.weight.requires_grad_(False)
    frozen = trace(nn.Sequential(first, second), (x,), {})
    assert frozen["1"].weight == 0 and frozen["1"].backward == pytest.approx(frozen["1"].forward)
    first.weight.requires_grad_(False)
    assert trace(nn.Sequential(first, second), (x,), {})["1"].backward == 0


def test_weights_cast_by_autocast_are_still_weights():
    """Under autocast every product sees a copy of the weight, and its gradient is a weight's gradient all the same."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        costs = trace(model, (torch.zeros(16, 64),), {})
    assert costs["1"].weight > 0 and costs["1"].backward > costs["1"].weight


def test_recomputed_modules_run_twice_and_keep_their_input():
    """Activation checkpointing trades memory for time; a partition that does not know puts too much on one stage."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    x = torch.zeros(4, 8)
    plain = trace(model, (x,), {})
    again = trace(model, (x,), {}, recomputed=lambda module: module is model[1])
    assert again["1"].forward == plain["1"].forward
    assert again["1"].backward == pytest.approx(plain["1"].backward + plain["1"].forward)
    assert again["1"].weight == plain["1"].weight
    assert again["1.0"].activation_bytes == again["1.2"].activation_bytes == 0
    assert again["1"].activation_bytes == 4 * 32 and plain["1"].activation_bytes > 4 * 32
    assert again["0"] == plain["0"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_the_model_makes_itself_run_twice_too(reentrant):
    """transformers' gradient_checkpointing_enable; its reentrant form runs without gradients and would look free."""

    class Checkpointing(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=reentrant)

    inner = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)]
    x = torch.zeros(4, 8)
    plain = trace(nn.Sequential(nn.Linear(8, 8), nn.Sequential(*inner)), (x,), {})
    again = trace(nn.Sequential(nn.Linear(8, 8), Checkpointing(*inner)), (x,), {})
    assert again["1"].backward == pytest.approx(plain["1"].backward + plain["1"].forward)
    assert again["1"].activation_bytes == 4 * 32


def test_nominal_seconds_are_a_function_of_work_alone():
    """They decide on rank 0 today and on another machine tomorrow."""
    assert nominal_seconds(8e10, 0, torch.float32, "cpu") == pytest.approx(1.0, rel=1e-4)
    assert nominal_seconds(0, 1e10, torch.float32, "cpu") == pytest.approx(1.0, rel=1e-4)
    assert nominal_seconds(8e10, 1e9, torch.float32, "cpu") < nominal_seconds(8e10, 2e10, torch.float32, "cpu")
    assert nominal_seconds(1e12, 0, torch.bfloat16, "cuda") < nominal_seconds(1e12, 0, torch.float32, "cuda")
    assert nominal_seconds(1e12, 0, torch.float32, "xpu") == nominal_seconds(1e12, 0, torch.float32, "cuda")
    texts = {repr(dict(trace(Head(), (torch.zeros(2, 4, dtype=torch.long),), {}))) for _ in range(3)}
    assert len(texts) == 1
