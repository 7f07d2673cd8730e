"""Rules by which any Python model runs over stages: who owns an operation, what hides from torch functions, buffers."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as early_checkpoint

import smp
from smp import StepError
from smp.pp.placed import Placed
from tests.harness import on_ranks
from tests.pp.reference import WIDTH, Net, check, linear, same, start, vectors, wrap

AB = {"a": 0, "b": 1}


def two(forward, **more):
    return Net(forward, a=linear(seed=1), b=linear(seed=2), **more)


def owner(tensor):
    """The stage a value lives on; None in the plain run, where there are no stages."""
    return tensor.value.owner if isinstance(tensor, Placed) else None


# -- who owns an operation ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_operation_runs_where_its_largest_operand_lives():
    """Moving the larger operand would move more bytes than needed."""
    seen = []

    def forward(net, x):
        large = net.b(x).repeat(3, 1)  # on stage 1
        small = net.a(x).sum(0)  # on stage 0, made later
        seen.append((owner(large), owner(small), owner(large * small), owner(small * large)))
        return (large * small).sum()

    check(two(forward), AB, steps=1)
    assert (1, 0, 1, 1) in seen


@on_ranks(2)
def test_a_tie_goes_to_the_operand_made_last():
    """Else a skip connection drags the newer value, and everything after it, back a stage."""
    seen = []

    def forward(net, x):
        old = net.a(x)
        new = net.b(old)
        seen.append((owner(old + new), owner(new + old), owner(torch.stack([new, old]))))
        back = net.a(new)
        seen.append((owner(back + new), owner(new * back)))
        return (old + new + back).sum()

    check(two(forward), AB, steps=1)
    assert (1, 1, 1) in seen and (0, 0) in seen


@on_ranks(2)
def test_values_go_back_and_forth_and_are_moved_once():
    """A value used many times on another stage, by many calls, with gradients from each of them."""

    def forward(net, x):
        h = net.a(x)
        total = net.b(h) + net.b(h * 2)
        for _ in range(3):
            total = net.b(net.a(total) + h).tanh()
        return (total * h).sum() + h.mean()

    check(two(forward), AB)


# -- what __torch_function__ does not see ------------------------------------------------------------------------------


class Weird(torch.autograd.Function):
    """Two inputs, two outputs, a gradient that no other code computes."""

    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * factor, y.sin()

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return 7 * first + x * 0, None, second * 5 + y * 0


class Scale(torch.autograd.Function):
    """x * w; gradients of both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


@on_ranks(2)
def test_parameters_of_glue_are_arguments_of_modules_and_functions_on_any_stage():
    """What the engine does to hand a Parameter over (detach it, read its version) must not count as calls of glue."""

    def forward(net, x):
        h = net.d(net.c(x, net.w), net.a.bias)
        return Scale.apply(Scale.apply(h, net.w), net.b.bias).sum()

    def add(net, x, w):
        return net.l(x).tanh() + w

    for stage in (0, 1):
        c, d = (Net(add, l=linear(seed=seed)) for seed in (3, 4))
        check(two(forward, c=c, d=d, w=nn.Parameter(torch.ones(WIDTH))), {**AB, "": stage, "c": 0, "d": 1})


class Marked(torch.autograd.Function):
    """One output that takes no gradient, one that is the input changed in place."""

    @staticmethod
    def forward(ctx, x):
        indices = x.argmax(-1)
        ctx.mark_non_differentiable(indices)
        return x * 2, indices

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 3


@on_ranks(2)
def test_autograd_functions_in_glue_keep_their_gradient():
    """apply() bypasses __torch_function__: its backward would be lost without a word."""

    def forward(net, x):
        h = net.a(x)
        first, second = Weird.apply(h, 2.0, net.b(h))
        third, indices = Marked.apply(first)
        assert not indices.requires_grad and indices.shape == (x.shape[0],)
        return (third + second).sum() + F.one_hot(indices, WIDTH).sum()

    check(two(forward), AB)
    # and inside a module, where nothing is intercepted
    inner = Net(lambda net, x: Weird.apply(net.l(x), 2.0, x)[0], l=linear())
    check(Net(lambda net, x: net.b(net.a(x)).sum(), a=inner, b=linear()), AB)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpoint_in_glue_works_on_modules(reentrant):
    """Modules on their stage, bound methods, partials with keywords, keyword arguments, and references taken early."""

    def forward(net, x):
        run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
        h = run(net.a, x * net.scale)
        h = early_checkpoint(net.b, h, use_reentrant=reentrant)
        h = run(net.a.forward, h)
        h = run(functools.partial(net.scaled, factor=3.0), h)
        if not reentrant:
            h = run(net.scaled, h, factor=2.0)
        return run(torch.tanh, h).sum()

    scaled = Net(lambda net, x, factor=1.0: net.l(x) * factor, l=linear())
    check(two(forward, scaled=scaled, scale=nn.Parameter(torch.ones(()))), {**AB, "scaled": 1})


@on_ranks(2)
def test_checkpointed_closures():
    """A closure holds tensors and modules that it was not given: they must not be lost, nor their gradients."""

    def closes_over_a_module(net, x):
        h = net.a(x)
        b = net.b

        def custom_forward(module):
            def run(*inputs):
                return module(*inputs)

            return run

        h = torch.utils.checkpoint.checkpoint(custom_forward(b), h, use_reentrant=False)
        h = torch.utils.checkpoint.checkpoint(lambda h: net.a(h), h, use_reentrant=False)
        h = torch.utils.checkpoint.checkpoint(lambda h, layers=(b,): layers[0](h), h, use_reentrant=True)
        return h.sum()

    def closes_over_a_tensor(net, x):
        h = net.a(x)
        other = net.b(x)

        def inner(h):
            return h * other

        return torch.utils.checkpoint.checkpoint(lambda h: inner(h) + 1, h, use_reentrant=False).sum()

    for forward in (closes_over_a_module, closes_over_a_tensor):
        check(two(forward), AB)


def worked_or_refused(module, where):
    """Whether the model trains as in plain PyTorch; when it does not, the error has to say where."""
    try:
        check(module, AB, steps=1)
    except StepError as error:
        refusal = str(error)
    else:
        return True
    assert where in refusal
    return False


@on_ranks(2)
def test_checkpoint_inside_a_module_of_one_stage():
    """There it is torch's own."""
    inner = Net(lambda net, x: torch.utils.checkpoint.checkpoint(net.l, x, use_reentrant=False), l=linear())
    check(Net(lambda net, x: net.b(net.a(x)).sum(), a=inner, b=linear()), AB)


@on_ranks(2)
def test_a_module_over_several_stages_is_not_checkpointed_but_right():
    """A warning and no checkpointing, and the same numbers."""
    body = nn.Sequential(linear(seed=1), nn.Dropout(0.0), linear(seed=2))

    def forward(net, x):
        return torch.utils.checkpoint.checkpoint(net.body, x, use_reentrant=False).sum()

    check(Net(forward, body=body), {"body.0": 0, "body.2": 1})


@on_ranks(2)
def test_vmap_and_functional_transforms_work_or_are_refused_by_line():
    """They work below torch's function level; a placed value there must not be computed as if it were empty."""

    def vmapped(net, x):
        return torch.vmap(lambda row: row * 2)(net.b(net.a(x))).sum()

    def functional_grad(net, x):
        h = net.a(x)
        return net.b(torch.func.grad(lambda y: (y * y).sum())(h)).sum()

    def functional_jvp(net, x):
        h = net.a(x)
        return net.b(torch.func.jvp(torch.sin, (h,), (h,))[1]).sum()

    def called(net, x):
        weights = dict(net.a.named_parameters())
        return net.b(torch.func.functional_call(net.a, weights, (x,))).sum()

    def mask(net, x):  # on plain tensors they are torch's own: masks of transformers are made so
        rows = torch.arange(x.shape[1])
        allowed = torch.vmap(lambda row: rows <= row)(rows)
        return net.b(net.a(x) @ allowed.double()).sum()

    for forward in (vmapped, functional_grad, functional_jvp):
        if not worked_or_refused(two(forward), "test_rules.py"):
            print(f"{forward.__name__} is refused")
    for forward in (called, mask):
        check(two(forward), AB)


@on_ranks(2)
def test_autograd_grad_and_its_kind_are_refused_by_line():
    """The graph behind a placed value is the tape: torch's own functions would find none, and return None."""

    def grad(net, x):
        h = net.a(x)
        (g,) = torch.autograd.grad(net.b(h).sum(), h, create_graph=True)
        return g.sum()

    def retained(net, x):
        h = net.a(x)
        h.retain_grad()
        return net.b(h).sum()

    def pointer(net, x):
        net.a(x).data_ptr()
        return net.b(x).sum()

    def graph(net, x):
        net.b(net.a(x)).sum().backward(retain_graph=True)
        return net.b(x).sum()

    for forward in (grad, retained, pointer, graph):
        line = forward.__code__.co_firstlineno
        with pytest.raises(StepError) as error:
            check(two(forward), AB, steps=1)
        found = re.search(r"test_rules\.py:(\d+)", str(error.value))
        assert found and line < int(found[1]) < line + 5, str(error.value)


@on_ranks(2)
def test_loss_backward_in_a_step_means_model_backward():
    """`loss.backward()` and `torch.autograd.backward` reach torch's engine, which knows one stage only."""
    for how in ("method", "function", "list"):
        start(microbatches=2)
        module = two(lambda net, x: net.b(net.a(x)).sum()).double()
        reference = [p.detach().clone().requires_grad_() for p in module.parameters()]
        model = wrap(module, AB)

        @smp.step
        def step(x, how=how, model=model):
            loss = model(x)
            if how == "method":
                loss.backward()
            elif how == "function":
                torch.autograd.backward(loss)
            else:
                torch.autograd.backward([loss, loss * 0.0], [torch.ones_like(loss), None])

        x = vectors(4)["x"]
        step(x)
        wa, ba, wb, bb = reference
        (F.linear(F.linear(x, wa, ba), wb, bb).sum() / 2).backward()
        names = ["a.weight", "a.bias", "b.weight", "b.bias"]
        for name, parameter in model.local_named_parameters():
            same(parameter.grad, reference[names.index(name)].grad, f"{how} {name}")


@on_ranks(2)
def test_full_backward_hooks():
    """On a module of one stage they see its gradients; on one over several stages no rank could see them all."""
    seen = []

    def hooked(net, x):
        return net.b(net.a(x)).sum()

    module = two(hooked)
    module.b.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].clone(), go[0].clone())))
    module.b.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    model = check(module, AB, steps=1)
    if smp.pp_rank() == 1:
        assert len(seen) == 4  # two microbatches here, two in the plain run
        for here, plain in zip(seen[:2], seen[2:]):
            same(here[0], plain[0], "gradient of the input")
            same(here[1], plain[1], "gradient of the output")
    del model
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        module = two(hooked)
        register(module, lambda *_: None)
        with pytest.raises(StepError, match="full backward hooks"):
            check(module, AB, steps=1)


@on_ranks(2)
def test_forward_hooks_run_on_every_level():
    """On glue modules they see placed values; on a stage's module they run with it."""
    order = []

    def hook(module, args, output):
        return output * 2

    module = two(lambda net, x: net.b(net.a(x)))
    module.register_forward_hook(lambda m, args, out: (out * 3).sum())
    module.a.register_forward_hook(hook)
    module.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module.b.register_forward_hook(lambda m, args, out: order.append("b"))
    check(module, AB)


# -- glue parameters and buffers ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_of_glue_modules_are_trained():
    """`self.pos * 1.0` has no placed operand: read unnoticed, the parameter would never get a gradient."""

    def forward(net, x):
        start = net.position * 1.0
        also = torch.exp(net.position).sum() + net.inner.weight.mean()
        h = net.b(net.a(x) + start)
        return (h * net.scale).sum() + also + F.linear(h, net.inner.weight, net.inner.bias).sum()

    module = two(
        forward,
        position=nn.Parameter(torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))),
        scale=nn.Parameter(torch.tensor(0.5)),
        inner=linear(seed=5),
        table=nn.ParameterList([nn.Parameter(torch.ones(2))]),
    )
    for inner in (0, 1):
        check(module_copy(module), {**AB, "inner": inner})


def module_copy(module):
    import copy

    return copy.deepcopy(module)


@on_ranks(2)
def test_a_parameter_used_before_the_models_first_call():
    """Reading a parameter in the step function partitions the model; its gradient must not be lost."""

    def loss_of(model, x):
        module = model.module if isinstance(model, smp.DistributedModel) else model
        penalty = (module.a.weight**2).sum() + (module.position * 2).sum()
        return model(x) + penalty

    module = two(lambda net, x: net.b(net.a(x)).sum(), position=nn.Parameter(torch.ones(3)))
    check(module, AB, loss_of=loss_of)
    module = two(lambda net, x: net.b(net.a(x)).sum(), position=nn.Parameter(torch.ones(3)))
    check(module, AB, loss_of=lambda model, x: loss_of(model, x) + sum(p.norm() for p in model.parameters()) * 0)


@on_ranks(2)
def test_buffers_of_glue_modules():
    """Constant ones are everywhere; one written in glue, in place or rebound, has one owner and its value is kept."""

    def forward(net, x):
        h = net.a(x * net.mask)
        if net.training:
            with torch.no_grad():
                net.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                net.count += 1
                net.last = h.detach().max()
                net.total = net.total + h.detach().sum(0)
        return (net.b(h - net.mean) * net.total.sigmoid()).sum() * net.last

    module = two(
        forward,
        mask=torch.tensor([1.0, 0, 1, 1]),
        mean=torch.zeros(WIDTH),
        count=torch.tensor(0),
        last=torch.tensor(1.0),
        total=torch.zeros(WIDTH),
    )
    for count in (1, 3):
        check(module_copy(module), AB, vectors(6), count=count, steps=3)


@pytest.mark.parametrize("checkpointed", [False, True])
@on_ranks(2)
def test_batch_norm_statistics_are_those_of_the_slices_in_order(checkpointed):
    """Running values move once per microbatch, not twice under checkpointing, and no gradient depends on pp (a2-5)."""

    def forward(net, x):
        placed = net.training and checkpointed and isinstance(x, Placed)  # torch's own recompute counts twice
        run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False) if placed else call
        return run(net.second, torch.relu(run(net.first, x))).sum() + net.b(net.a(x)).sum()

    def call(module, x):
        return module(x)

    first = nn.Sequential(linear(seed=3), nn.BatchNorm1d(WIDTH))
    second = nn.Sequential(linear(seed=4), nn.BatchNorm1d(WIDTH), linear(seed=5))
    places = {**AB, "first": 0, "second": 1}
    model = check(two(forward, first=first, second=second), places, vectors(12), count=4)
    for name, buffer in model.local_named_buffers():
        if name.endswith("num_batches_tracked"):
            assert buffer.item() == 8, (name, buffer)


@on_ranks(2)
def test_modules_without_parameters_follow_their_input():
    """An activation, a loss or a dropout in glue runs where its input lives, not on stage 0."""
    seen = []

    def forward(net, x):
        h = net.act(net.b(net.drop(net.a(x))))
        seen.append(owner(h))
        values, (inner, flag) = net.nest(h)
        assert flag == "flag"
        return net.loss(values, torch.zeros_like(values)) + inner["deep"].sum()

    nest = Net(lambda net, x: (x, ({"deep": x * 2}, "flag")))
    module = two(forward, act=nn.GELU(), drop=nn.Dropout(0.0), loss=nn.MSELoss(), nest=nest)
    check(module, AB)
    assert 1 in seen


@on_ranks(2)
def test_shared_parameters_and_shared_modules():
    """One weight under two names, one module called twice over stages, a weight read in glue too: gradients add up."""

    def forward(net, x):
        h = net.b(net.a(x))
        h = net.tied(h)
        return net.b(net.a(h)).sum() + F.linear(h, net.a.weight).sum()

    module = two(forward, tied=linear(seed=9))
    module.tied.weight = module.a.weight
    model = check(module, AB)
    assert model.stage_of["tied.weight"] == model.stage_of["a.weight"] == 0


@on_ranks(3)
def test_a_stage_in_the_middle_is_passed_over():
    """A value sent from stage 0 to 2 directly; stage 1 does nothing in this program, or everything."""
    module = Net(lambda net, x: net.b(net.a(x)).sum(), a=linear(seed=1), b=linear(seed=2))
    check(module, {"a": 0, "b": 2}, pp=3)
    module = Net(lambda net, x: net.b(net.a(x)).sum(), a=linear(seed=1), b=linear(seed=2))
    check(module, {"a": 1, "b": 1}, pp=3)
    module = Net(lambda net, x: net.b(net.a(x)).sum(), a=linear(seed=1), b=linear(seed=2))
    check(module, {"a": 2, "b": 0}, pp=3)
