"""A step's arguments are cut into microbatches, and its outputs put together again."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import smp
from smp import StepError
from smp.pp.microbatch import StepOutput, merge_outputs, split_arguments
from tests.harness import on_ranks

transformers = pytest.importorskip("transformers")
from transformers import BatchEncoding  # noqa: E402
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Batch:
    ids: torch.Tensor
    extra: dict = field(default_factory=dict)
    name: str = "batch"


@dataclass
class Settings:
    rate: float = 0.1


class Sliced:
    """Splits itself, in its own way."""

    def __init__(self, asked=()):
        self.asked = asked

    def smp_slice(self, num_mb, mb, axis):
        return Sliced((num_mb, mb, axis))


def split(count=2, non_split=(), axes=None, **arguments):
    return split_arguments(arguments, count, non_split, axes or {})


def test_tensors_are_cut_on_axis_0_in_order():
    """A microbatch with other rows would be another batch."""
    x = torch.arange(12).reshape(6, 2)
    for count in (1, 2, 3, 6):
        parts = split(count, x=x)
        assert len(parts) == count
        assert torch.equal(torch.cat([part["x"] for part in parts]), x)
        assert {part["x"].shape for part in parts} == {(6 // count, 2)}


def test_every_container_of_the_contract_is_opened_and_rebuilt():
    """A tensor in a container that is not opened would go whole to every microbatch: trained on twice."""
    x = torch.arange(4)
    arguments = {
        "a_list": [x, [x, "text"]],
        "a_tuple": (x, (x, None)),
        "a_named_tuple": Pair(x, 3),
        "a_dict": {"k": x, "deep": {"er": [x]}},
        "ordered": OrderedDict(k=x),
        "default": defaultdict(list, k=x),
        "a_dataclass": Batch(x, {"mask": x}),
        "a_model_output": CausalLMOutput(logits=x),
        "an_encoding": BatchEncoding({"input_ids": x, "attention_mask": x}),
    }
    first, second = split(2, **arguments)
    for part, rows in ((first, x[:2]), (second, x[2:])):
        assert [type(part[name]) for name in arguments] == [type(value) for value in arguments.values()]
        found = [
            *[part["a_list"][0], part["a_list"][1][0], part["a_tuple"][0], part["a_tuple"][1][0]],
            *[part["a_named_tuple"].left, part["a_dict"]["k"], part["a_dict"]["deep"]["er"][0], part["ordered"]["k"]],
            *[part["default"]["k"], part["a_dataclass"].ids, part["a_dataclass"].extra["mask"]],
            *[part["a_model_output"].logits, part["a_model_output"]["logits"]],
            *[part["an_encoding"]["input_ids"], part["an_encoding"].attention_mask],
        ]
        for tensor in found:
            assert torch.equal(tensor, rows)
        assert part["a_list"][1][1] == "text" and part["a_tuple"][1][1] is None and part["a_named_tuple"].right == 3
        assert part["default"]["missing"] == []
        assert part["a_dataclass"].name == "batch"
        assert part["a_model_output"].loss is None
    assert torch.equal(arguments["a_list"][0], x)  # the caller's own objects are left alone


def test_sets_are_opened():
    """API: nested in list, tuple, dict, set, dataclass."""
    x, y = torch.arange(4), torch.arange(4, 8)
    for part, rows in zip(split(2, s={x, y, "name"}), ([0, 1], [2, 3])):
        assert type(part["s"]) is set and "name" in part["s"]
        tensors = sorted(t.tolist() for t in part["s"] if isinstance(t, torch.Tensor))
        assert tensors == [rows, [r + 4 for r in rows]]


def test_what_is_no_tensor_goes_whole_and_is_the_same_object():
    """A script passes its model, optimizer and argparse namespace into a step function, and lists to append to."""
    namespace, collected, nothing = SimpleNamespace(rate=1), [], {}
    module, settings = torch.nn.Linear(1, 1), Settings()
    parts = split(
        2, n=namespace, c=collected, e=nothing, m=module, s=settings, t="text", i=3, none=None, d={"deep": collected}
    )
    for part in parts:
        assert part["n"] is namespace and part["c"] is collected and part["e"] is nothing
        assert part["m"] is module and part["s"] is settings
        assert part["t"] == "text" and part["i"] == 3 and part["none"] is None
        assert part["d"]["deep"] is collected


def test_zero_dim_tensors_go_whole():
    """A loss weight has no rows."""
    weight = torch.tensor(0.5)
    for part in split(2, w=weight, nested={"w": weight, "x": torch.arange(2)}):
        assert part["w"] is weight and part["nested"]["w"] is weight
        assert part["nested"]["x"].shape == (1,)


def test_an_object_that_slices_itself_is_asked():
    """smp_slice(num_mb, mb, axis), also inside a container, with the axis of its argument."""
    for k, part in enumerate(split(3, axes={"s": 2}, s=Sliced(), nested=[Sliced()])):
        assert part["s"].asked == (3, k, 2)
        assert part["nested"][0].asked == (3, k, 0)


def test_axes_and_whole_arguments_are_by_name():
    """input_split_axes and non_split_inputs reach into containers too."""
    x = torch.arange(24).reshape(2, 4, 3)
    first, second = split(2, ["whole"], {"time_first": 1, "last": -2}, time_first=[x], last=x, whole={"x": x}, plain=x)
    assert torch.equal(first["time_first"][0], x[:, :2]) and torch.equal(second["time_first"][0], x[:, 2:])
    assert torch.equal(second["last"], x[:, 2:])
    assert first["whole"]["x"] is x and second["whole"]["x"] is x
    assert torch.equal(second["plain"], x[1:])


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_that_does_not_divide_is_refused_by_name(nested):
    """The user must see which argument, its shape and the count, not a stack of torch."""
    x = torch.zeros(5, 3)
    with pytest.raises(StepError) as error:
        split(2, fine=torch.zeros(4), labels={"deep": [x]} if nested else x)
    for said in ("'labels'", "(5, 3)", "5", "2 microbatches", "non_split_inputs"):
        assert said in str(error.value)
    with pytest.raises(StepError) as error:
        split(4, axes={"labels": 3}, labels=x)
    for said in ("'labels'", "(5, 3)", "no axis 3", "4"):
        assert said in str(error.value)
    with pytest.raises(StepError, match="axis 1 of length 3"):
        split(2, axes={"x": 1}, x=torch.zeros(4, 3))
    with pytest.raises(StepError, match="'empty'.*of length 1"):
        split(2, empty=torch.zeros(1, 3))


def test_step_output():
    """The methods that every script uses on the losses and logits it gets back."""
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    assert output.reduce_mean().tolist() == [2.0, 4.0]
    assert output.reduce_sum().tolist() == [4.0, 8.0]
    assert output.concat().tolist() == [1.0, 2.0, 3.0, 6.0]
    assert output.stack().tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert [t.tolist() for t in output.outputs] == [[1.0, 2.0], [3.0, 6.0]]
    ragged = StepOutput([torch.zeros(2, 3), torch.zeros(1, 3)])
    assert ragged.concat().shape == (3, 3)
    scalars = StepOutput([torch.tensor(1.0, requires_grad=True) * 2, torch.tensor(4.0)])
    assert scalars.concat().tolist() == [2.0, 4.0]
    detached = scalars.detach()
    assert isinstance(detached, StepOutput) and not detached.outputs[0].requires_grad
    assert scalars.outputs[0].requires_grad
    assert scalars.detach().reduce_mean().item() == 3.0
    half = StepOutput([torch.tensor(1, dtype=torch.bfloat16)] * 3).reduce_mean()
    assert half.dtype == torch.bfloat16


def test_outputs_are_merged_leaf_by_leaf():
    """Return structure is kept; each tensor becomes a StepOutput, each other leaf a list over microbatches."""

    def output(k):
        loss = torch.tensor(float(k))
        return {"loss": loss, "rest": (k, [f"text {k}", None]), "out": CausalLMOutput(loss=loss, logits=loss + 1)}

    merged = merge_outputs([output(0), output(1)])
    assert merged["loss"].reduce_sum().item() == 1.0
    assert merged["rest"] == ([0, 1], [["text 0", "text 1"], [None, None]])
    assert type(merged["out"]) is CausalLMOutput
    assert merged["out"].logits.stack().tolist() == [1.0, 2.0]
    assert merged["out"]["loss"].stack().tolist() == [0.0, 1.0]
    assert merge_outputs([None, None]) is None
    assert merge_outputs([(), ()]) == ()
    single = merge_outputs([torch.zeros(2)])
    assert isinstance(single, StepOutput) and len(single.outputs) == 1


def test_microbatches_that_return_different_structures_give_a_plain_list():
    """Nothing may be lost or paired wrongly."""
    outputs = [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}]
    assert merge_outputs(outputs) is outputs


@on_ranks(1, config={"microbatches": 2})
def test_step_decorator_on_one_process():
    """Defaults, keywords, *args, **kwargs and methods; the count can be set for one function."""

    @smp.step
    def plain(x, scale=2.0, *rest, flag=False, **more):
        assert x.shape == (2, 3)
        return x.sum() * scale, flag, [r.shape for r in rest], {k: v.shape for k, v in more.items()}

    x = torch.ones(4, 3)
    total, flags, rest, more = plain(x, 3.0, x, flag=True, extra=x)
    assert total.reduce_sum().item() == 36.0
    assert flags == [True, True]
    assert more["extra"] == [torch.Size([2, 3])] * 2
    assert rest == [[torch.Size([2, 3])] * 2]
    assert plain.__name__ == "plain"

    @smp.step(microbatches=1, non_split_inputs=["y"], input_split_axes={"x": 1})
    def one(x, y):
        return x.shape, y.shape

    assert one(torch.zeros(3, 5), torch.zeros(7)) == ([torch.Size([3, 5])], [torch.Size([7])])

    class Trainer:
        @smp.step()
        def train(self, x):
            return x * 2

    assert torch.equal(Trainer().train(x).concat(), x * 2)

    graph = torch.ones(4, requires_grad=True)
    kept = smp.step(lambda x: x * graph[:2], detach_outputs=False)(torch.ones(4))
    assert kept.outputs[0].requires_grad
    assert not smp.step(lambda x: x * graph[:2])(torch.ones(4)).outputs[0].requires_grad

    with pytest.raises(StepError, match=r"\['z'\].*\['x'\]"):
        smp.step(lambda x: x, non_split_inputs=["z"])
    with pytest.raises(StepError, match="step function was called inside a step function"):
        smp.step(lambda x: plain(x))(x)
    with pytest.raises(StepError, match="'x' has shape \\(3, 3\\)"):
        plain(x[:3])
    with pytest.raises(TypeError):
        plain()
    with pytest.raises(StepError, match="must be at least 1"):
        smp.step(microbatches=0)(lambda x: x)
    assert torch.equal(smp.step(lambda x: x)(x).concat(), x)  # still usable after all of these
