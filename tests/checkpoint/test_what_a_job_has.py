"""What a script may have beside the parameters of its model: it is saved and found again, or refused when it saves."""

import argparse
from collections import Counter

import pytest
import torch
from torch import nn

import smp
from smp import runtime
from smp.checkpoint.found import single
from smp.errors import CheckpointError, SmpError, UsageError
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.stateful import shared_directory


class Counting(nn.Module):
    """Counts its calls in extra state."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.linear = nn.Linear(4, 4)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x)


def job_of(stages, first, second):
    """One module on the first stage and one on the last."""
    runtime.reset()
    smp.init({"pipeline_parallel_degree": stages, "ddp": True})
    module = nn.Sequential(first, second)
    smp.set_partition(module[0], 0)
    smp.set_partition(module[1], stages - 1)
    model = smp.DistributedModel(module)

    @smp.step
    def run(x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    return model, lambda: run(torch.ones(2, 4))


def calls(model):
    return [int(module.calls) for module in model.module]


@pytest.mark.parametrize("start", [0, torch.tensor(0)])
@on_ranks(2, config={"ddp": True}, timeout=120)
def test_extra_state_is_that_of_the_stage_that_ran_the_module(start):
    """Every rank has a copy of every module, and those of other stages never ran: taken from there, the state of the
    beginning would come back."""
    with shared_directory() as directory:
        model, step = job_of(2, Counting(start), Counting(start))
        step()
        step()
        assert calls(model) == ([2, 0], [0, 2])[smp.pp_rank()]
        smp.save_checkpoint(directory, "a", model=model)
        smp.save_checkpoint(directory, "full", partial=False, model=model)
        whole, part = model.state_dict(), model.local_state_dict()
        assert [int(whole[f"{number}._extra_state"]) for number in range(2)] == [2, 2]
        model.load_state_dict(part)
        assert calls(model) == [2, 2]
        for tag, partial in (("a", True), ("full", False)):
            model, step = job_of(1, Counting(start), Counting(start))
            smp.resume_from_checkpoint(directory, tag, partial=partial, load_optimizer=False)
            assert calls(model) == [2, 2]


@on_ranks(1, config={"ddp": True}, timeout=120)
def test_extra_state_in_a_counter_comes_back_as_it_was():
    """`Counter.update` adds where that of a dict replaces: counts would double at every save and every resume."""
    with shared_directory() as directory:
        model, _ = job_of(1, Counting(Counter(tokens=5)), Counting(Counter(tokens=5)))
        smp.save_checkpoint(directory, "a", model=model)
        model, _ = job_of(1, Counting(Counter()), Counting(Counter()))
        smp.resume_from_checkpoint(directory, load_optimizer=False)
        assert [module.calls for module in model.module] == [Counter(tokens=5)] * 2


class Growing(nn.Module):
    """Keeps the batches it has seen in a buffer that grows."""

    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(rows, 4))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()])
        return self.linear(x)


@pytest.mark.parametrize("partial", [True, False])
@on_ranks(2, config={"ddp": True}, timeout=120)
def test_a_buffer_has_the_shape_that_it_has_on_its_own_stage(partial):
    """Other stages know the one of the beginning: recorded from there, the buffer would silently stay empty."""
    with shared_directory() as directory:
        model, step = job_of(2, Growing(0), Growing(0))
        step()
        smp.save_checkpoint(directory, "a", partial=partial, model=model)
        seen = model.state_dict()["0.seen"]
        smp.resume_from_checkpoint(directory, partial=partial)  # fits where it was saved
        state = model.local_state_dict() if partial else model.state_dict()
        state = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        model.module[smp.pp_rank()].seen.zero_()
        model.load_state_dict(state)
        assert torch.equal(model.state_dict()["0.seen"], seen)
        assert single(directory).read("model", "0.seen").shape == (2, 4)
        for wrong in (0, 1):
            model, _ = job_of(1, Growing(wrong), Growing(wrong))
            with pytest.raises(CheckpointError, match=rf"0.seen has shape \[2, 4\], the model has \[{wrong}, 4\]"):
                smp.resume_from_checkpoint(directory, partial=partial)
        model, _ = job_of(1, Growing(2), Growing(2))
        smp.resume_from_checkpoint(directory, partial=partial)
        assert torch.equal(model.module[0].seen, seen)


def job(make):
    runtime.reset()
    smp.init({})
    model = smp.DistributedModel(nn.Linear(3, 2))
    return model, smp.DistributedOptimizer(make(list(model.parameters())))


def update(model, optimizer, *others):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).square().sum() + sum(other.square().sum() for other in others)
    model.backward(loss)
    optimizer.step()


def hook(parameter):
    return parameter


@on_ranks(1, config={})
def test_what_could_not_be_read_again_is_refused_when_it_is_saved():
    """Found out when the job is resumed, weeks of training are in a file that nobody reads."""
    with shared_directory() as directory:
        for option in (hook, Counting(0)):
            model, optimizer = job(lambda params, option=option: torch.optim.SGD([{"params": params, "mine": option}]))
            with pytest.raises(CheckpointError, match=r"optimizer_0_0.pt holds .*(hook|Counting).*add_safe_globals"):
                smp.save_checkpoint(directory, "a", model=model, optimizer=optimizer)
            assert not any(directory.iterdir())
        model, optimizer = job(lambda params: torch.optim.SGD([{"params": params, "mine": argparse.Namespace(a=1)}]))
        smp.save_checkpoint(directory, "a", model=model, optimizer=optimizer)
        smp.resume_from_checkpoint(directory, "a")
        assert optimizer.param_groups[0]["mine"] == argparse.Namespace(a=1)


@on_ranks(1, config={})
def test_user_content_that_cannot_be_pickled_is_named():
    """An object may raise anything when it is pickled: "maximum recursion depth exceeded" alone says nothing."""
    model, _ = job(torch.optim.SGD)
    nest = []
    for _ in range(100000):
        nest = [nest]
    with shared_directory() as directory:
        for content in (nest, iter(torch.utils.data.DataLoader([0]))):
            with pytest.raises(CheckpointError, match="user_content cannot be saved"):
                smp.save_checkpoint(directory, "a", model=model, user_content=content)
        while nest:  # freed as it is, it would overrun the stack
            nest = nest.pop()


class Odd(nn.Module):
    """Has what is no dense parameter or buffer in its state dict, or in its optimizer's."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(4, 4, sparse=kind == "state")
        if kind == "buffer":
            self.register_buffer("graph", torch.eye(4).to_sparse())

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.kind == "attribute":
            destination[prefix + "scale"] = torch.ones(2)

    def forward(self, x):
        return x + self.table(torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("buffer", "1.graph is sparse .*dense tensors only"),
        ("state", r"optimizer state 'momentum_buffer' of [01].table.weight is sparse"),
        ("attribute", "holds a tensor [01].scale, which is no parameter or buffer"),
    ],
)
@on_ranks(2, config={"ddp": True}, timeout=120)
def test_tensors_that_have_no_place_in_a_checkpoint_are_named_on_all_ranks(kind, says, partial):
    """Left to torch or to the transport, one rank raises what names nothing, and the other waits for it."""
    model, step = job_of(2, Odd("" if kind == "buffer" else kind), Odd(kind))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step()
    optimizer.step()
    with shared_directory() as directory:
        with pytest.raises(SmpError, match=says):
            smp.save_checkpoint(directory, "a", partial=partial, model=model, optimizer=optimizer)
        assert not any(directory.iterdir())


SGD = torch.optim.SGD
KINDS = [
    (lambda params: SGD(params, lr=0.1, momentum=0.9), torch.optim.AdamW),
    (torch.optim.AdamW, lambda params: SGD(params, lr=0.1, momentum=0.9)),
    (torch.optim.Adagrad, torch.optim.RMSprop),
    (torch.optim.AdamW, lambda params: smp.optimizers.FusedLAMB(params)),
]


@pytest.mark.parametrize("number", range(len(KINDS)))
@on_ranks(1, config={})
def test_the_state_of_another_kind_of_optimizer_is_refused(number):
    """Its options and state would be mixed with the job's: the next step fails, or goes wrong without a word."""
    saved, made = KINDS[number]
    with shared_directory() as directory:
        model, optimizer = job(saved)
        update(model, optimizer)
        state = optimizer.state_dict()
        smp.save_checkpoint(directory, "a", model=model, optimizer=optimizer)
        model, optimizer = job(made)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match="has no option .* it was of another kind"):
            smp.resume_from_checkpoint(directory, "a")
        with pytest.raises(CheckpointError, match="has no option .* it was of another kind"):
            optimizer.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        smp.resume_from_checkpoint(directory, "a", load_optimizer=False)
        update(model, optimizer)


@pytest.mark.parametrize("partial", [True, False])
@on_ranks(1, config={})
def test_an_optimizer_of_fewer_parameters_than_the_saved_one_is_refused(partial):
    """The state of the others would be dropped, and missing when all of them train again."""
    with shared_directory() as directory:
        model, optimizer = job(torch.optim.AdamW)
        update(model, optimizer)
        smp.save_checkpoint(directory, "a", partial=partial, model=model, optimizer=optimizer)
        model, optimizer = job(lambda params: torch.optim.AdamW(params[:1]))
        with pytest.raises(CheckpointError, match="holds optimizer state of bias, which the job's optimizer was not"):
            smp.resume_from_checkpoint(directory, "a", partial=partial)
        smp.resume_from_checkpoint(directory, "a", partial=partial, load_optimizer=False)


@on_ranks(2, config={"ddp": True})
def test_gradients_that_are_not_saved_are_spoken_of():
    """A job that is saved within an accumulation window goes on without the window's first passes."""
    model = smp.DistributedModel(nn.Linear(3, 2), backward_passes_per_step=2)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    with shared_directory() as directory:
        for is_within in (True, False):
            model.backward(model(torch.ones(2, 3)).sum())
            with log_lines() as lines:
                smp.save_checkpoint(directory, "a", model=model, optimizer=optimizer)
            assert any("gradients are accumulated that no step has used yet" in line for line in lines) == (
                is_within and smp.rank() == 0
            )


@on_ranks(1, config={})
def test_state_of_parameters_beside_the_model_comes_back():
    """A loss with parameters of its own is trained by the same optimizer; its step counter has not its shape."""
    with shared_directory() as directory:
        own = nn.Parameter(torch.ones(3))
        model, optimizer = job(lambda params: torch.optim.AdamW([{"params": params}, {"params": [own]}]))
        for _ in range(2):
            update(model, optimizer, own)
        want = {key: value.clone() for key, value in optimizer.state[own].items()}
        smp.save_checkpoint(directory, "a", model=model, optimizer=optimizer)
        model, optimizer = job(lambda params: torch.optim.AdamW([{"params": params}, {"params": [own]}]))
        smp.resume_from_checkpoint(directory, "a")
        got = optimizer.state[own]
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


@on_ranks(1, config={})
def test_tags_that_would_hide_or_overwrite_another_checkpoint_are_refused():
    """`newest` is a line of text, and the files of a full checkpoint have fixed names beside its own."""
    model, _ = job(torch.optim.AdamW)
    with shared_directory() as directory:
        for tag in ("a ", " a", "a\n", "a\0b"):
            with pytest.raises(UsageError, match="it becomes a file's name"):
                smp.save_checkpoint(directory, tag, model=model)
        for tag in ("optimizer_5", "user_content_5", "5.manifest.json", "5_partial"):
            with pytest.raises(UsageError, match="files of other checkpoints are called so"):
                smp.save_checkpoint(directory, tag, partial=False, model=model)
            smp.save_checkpoint(directory, tag, model=model)


def staged_job(num_trained=2):
    runtime.reset()
    smp.init({"pipeline_parallel_degree": 2})
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for stage, child in enumerate(module):
        smp.set_partition(child, stage)
    model = smp.DistributedModel(module)
    trained = module[:num_trained].parameters()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1, momentum=0.9))

    @smp.step
    def run(x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    def step():
        run(torch.ones(2, 4))
        optimizer.step()

    return model, optimizer, step


@pytest.mark.parametrize("partial", [True, False])
@on_ranks(2, config={"pipeline_parallel_degree": 2}, timeout=120)
def test_what_a_script_sets_between_resuming_and_the_first_step_stays(partial):
    """The model is partitioned at the first step, long after the script has set another learning rate or has made a
    scheduler that goes on; what is loaded then must not take it back."""
    with shared_directory() as directory:
        model, optimizer, step = staged_job()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step()
        scheduler.step()
        whole = model.state_dict()
        smp.save_checkpoint(directory, "a", partial=partial, model=model, optimizer=optimizer)
        model, optimizer, step = staged_job()
        smp.resume_from_checkpoint(directory, partial=partial)
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5, last_epoch=1).base_lrs == [0.1]
        for state_dict in (model.state_dict, optimizer.state_dict):
            with pytest.raises(UsageError, match="state_dict.* was called between"):
                state_dict()
        optimizer.param_groups[0]["lr"] = 0.0
        step()
        assert optimizer.param_groups[0]["lr"] == 0.0 and len(optimizer.state) == 2
        assert all(torch.equal(value, whole[name]) for name, value in model.local_named_parameters())


@on_ranks(2, config={"pipeline_parallel_degree": 2}, timeout=120)
def test_what_is_loaded_before_the_first_step_takes_effect_in_the_order_of_the_calls():
    """As it would after the first step: a checkpoint does not take the place of what was loaded over it."""
    with shared_directory() as directory:
        states = []
        for tag in ("a", "b"):
            model, optimizer, step = staged_job()
            step()
            states.append((model.state_dict(), optimizer.state_dict()))
            smp.save_checkpoint(directory, tag, model=model, optimizer=optimizer)
        (weights, momenta), (other_weights, other_momenta) = states
        momenta["param_groups"][0]["lr"] = 0.25

        def freeze_and_step():
            optimizer.param_groups[0]["lr"] = 0.0
            step()
            return optimizer.state_dict()["state"]

        model, optimizer, step = staged_job()
        smp.resume_from_checkpoint(directory, "b")
        model.load_state_dict(weights)
        optimizer.load_state_dict(momenta)
        assert optimizer.param_groups[0]["lr"] == 0.25
        after_a = freeze_and_step()
        assert optimizer.param_groups[0]["lr"] == 0.0
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

        model, optimizer, step = staged_job()
        model.load_state_dict(other_weights)
        optimizer.load_state_dict(other_momenta)
        smp.resume_from_checkpoint(directory, "a")
        assert optimizer.param_groups[0]["lr"] == 0.1
        after = freeze_and_step()
        assert all(torch.equal(after[at]["momentum_buffer"], after_a[at]["momentum_buffer"]) for at in range(4))
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("partial", [True, False])
@on_ranks(2, config={"pipeline_parallel_degree": 2}, timeout=120)
def test_groups_may_be_added_between_resuming_and_the_first_step(partial):
    """As after it, and as with one stage: scripts that train more layers from some step on resume first."""

    def go_on(model, optimizer, step):
        optimizer.add_param_group({"params": model.module[1].parameters(), "lr": 0.01})
        model.zero_grad()
        step()
        return model.state_dict()

    with shared_directory() as directory:
        model, optimizer, step = staged_job(num_trained=1)
        step()
        smp.save_checkpoint(directory, "a", partial=partial, model=model, optimizer=optimizer)
        want = go_on(model, optimizer, step)
        model, optimizer, step = staged_job(num_trained=1)
        smp.resume_from_checkpoint(directory, partial=partial)
        got = go_on(model, optimizer, step)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
        assert all(torch.equal(value, want[name]) for name, value in got.items())
