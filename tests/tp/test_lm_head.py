"""DistributedTransformerLMHead against its undistributed twin: losses, logits, gradients, updated parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp import runtime
from smp.comm import collectives
from smp.nn import DistributedTransformerLMHead
from smp.tp.shard import spec_of
from tests.harness import on_ranks
from tests.tp.lm_twin import GPT2, SIZES, distributed, gathered, text, twin_of
from tests.tp.transformer_twin import Twin as LayerTwin
from tests.tp.transformer_twin import assert_equals_twin, setup
from tests.tp.twins import config, local, tp_group

POST = {**SIZES, "causal_mask_size": None}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False, "lm_head_bias": True},
    "post-norm": POST,
    "masked": {**POST, "num_token_types": 2, "embedding_layernorm": True, "vocab_size": 12, "lm_head_bias": True},
    "cross": {**GPT2, "add_cross_attention": True, "num_token_types": 3, "tie_word_embeddings": False},
    "no-tables": {**GPT2, "num_positions": 0, "final_layernorm": False},
}


def on_tp(**options: Any) -> Any:
    return on_ranks(
        lambda a: a["tp"],
        config=lambda a: config(a["tp"], a["prescaled"], optimize=a["optimize"]),
        launcher=lambda a: a.get("launcher", "mpi"),
        **options,
    )


def all_modes(test: Any) -> Any:
    test = pytest.mark.parametrize("optimize", ["speed", "memory"])(test)
    test = pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])(test)
    return pytest.mark.parametrize("tp", [1, 2, 4])(test)


def batches(options: dict[str, Any], number: int = 0, **sizes: int) -> list[tuple[Any, ...]]:
    """One batch for each rank; a single one where all share it."""
    num = 1 if runtime.get().config.prescaled_batch else tp_group().size
    return [text(options, number * 10 + part, **sizes) for part in range(num)]


def own(parts: list[Any]) -> Any:
    return parts[tp_group().rank if len(parts) > 1 else 0]


def close(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-9) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    difference = (got.double() - want.double()).norm() / want.norm().clamp_min(1e-3)
    assert difference <= tolerance, f"{what} differs by {difference:.2e}"


def assert_same_gradients(module: torch.nn.Module, twin: torch.nn.Module, tolerance: float = 1e-9) -> None:
    """Those of whole parameters are reduced first. The twin's gradients are those of the sum over all batches."""
    shared = runtime.get().config.prescaled_batch
    theirs = dict(twin.named_parameters())
    for name, param in module.named_parameters():
        assert param.grad is not None, name
        if spec_of(param) is None and not shared:
            param.grad = collectives.all_reduce(param.grad, tp_group())  # what the reducer does for whole parameters
        close(param.grad, local(theirs[name].grad, param), f"gradient of {name}", tolerance)


@pytest.mark.parametrize("name", MODELS)
@all_modes
@on_tp()
def test_trains_like_its_twin(tp, prescaled, optimize, name):
    """Two steps: loss, gradients of states that come from outside, of every parameter, and the parameters after it."""
    options = MODELS[name]
    twin = twin_of(options)
    module = distributed(twin)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (module, twin)]
    for step in range(2):
        parts = batches(options, step)
        mine = own(parts)
        if options.get("add_cross_attention"):
            mine = (*mine[:4], mine[4].clone().requires_grad_(), *mine[5:])
            parts = [(*part[:4], part[4].clone().requires_grad_(), *part[5:]) for part in parts]
        loss = module(mine)
        losses = [twin(part) for part in parts]
        close(loss, own(losses), "loss")
        loss.backward()
        sum(losses).backward()
        if options.get("add_cross_attention"):
            close(mine[4].grad, own(parts)[4].grad, "gradient of cross states")
        assert_same_gradients(module, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(twin.named_parameters())
    for name, param in module.named_parameters():
        close(param, local(theirs[name], param), f"{name} after the step")


@pytest.mark.parametrize("name", ["gpt2", "masked", "cross"])
@all_modes
@on_tp()
def test_logits_of_the_own_batch_equal_those_of_its_twin(tp, prescaled, optimize, name):
    """Without labels: whole logits [N, S, V], no padded columns, and gradients that come back through them."""
    options = MODELS[name]
    twin = twin_of(options)
    module = distributed(twin)
    parts = [(*part[:-1], None) for part in batches(options)]
    weight = torch.linspace(0.5, 1.5, options["vocab_size"], dtype=torch.float64)
    logits, theirs = module(own(parts)), [twin(part) for part in parts]
    close(logits, own(theirs), "logits")
    numbered = enumerate(theirs, 1)
    (logits.square() * weight).mean().mul(1 if prescaled else tp_group().rank + 1).backward()
    sum((out.square() * weight).mean() * number for number, out in numbered).backward()
    assert_same_gradients(module, twin)


@all_modes
@on_tp()
def test_other_inputs_are_taken_as_its_twin_takes_them(tp, prescaled, optimize):
    """No mask; positions by row, for all rows, in reverse; a sequence that does not divide; loss and logits together;
    no head; labels shifted the other way; evaluation without gradients."""
    options = {**GPT2, "num_token_types": 2}
    twin = twin_of(options)
    module = distributed(twin)
    both = distributed(twin, logits_with_loss=True)
    for length in (4, 3):
        for positions in (None, torch.arange(length).flip(0)[None], torch.arange(2 * length).view(2, length) % 5):
            parts = [
                (ids, mask if positions is None else None, None, positions, labels)
                for ids, mask, _, _, labels in batches(options, length=length)
            ]
            close(module(own(parts)), twin(own(parts)), "loss")
    parts = batches(options)
    loss, logits = both(own(parts))
    close(loss, twin(own(parts)), "loss beside logits")
    close(logits, twin((*own(parts)[:-1], None)), "logits beside the loss")
    with torch.no_grad():
        close(module.eval()(own(parts)), loss, "loss in evaluation")
    for shift_labels, name in [(False, "gpt2"), (True, "post-norm")]:
        unusual = twin_of({**MODELS[name], "shift_labels": shift_labels})
        batch = own(batches(MODELS[name]))
        close(distributed(unusual)(batch), unusual(batch), "loss of labels that are shifted the other way")
    headless = twin_of({**options, "add_lm_head": False})
    parts = [(*part[:-1], None) for part in parts]
    close(distributed(headless)(own(parts)), headless(own(parts)), "hidden states")


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_float32_and_bf16_follow_their_twin(tp, prescaled, optimize):
    """float32 at what users may expect; bf16, also under autocast, within a few of its roundings (2^-8), the loss being
    float32."""
    twin = twin_of(GPT2, dtype=torch.float32)
    module = distributed(twin)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(own(batches(GPT2)))
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(param.grad.dtype == torch.float32 for param in module.parameters())
    close(loss, twin(own(batches(GPT2))), "loss under autocast", 8 * 2.0**-8)
    for dtype, tolerance in [(torch.float32, 1e-5), (torch.bfloat16, 8 * 2.0**-8)]:
        twin = twin_of(GPT2, dtype=dtype)
        loss = distributed(twin)(own(batches(GPT2)))
        assert loss.dtype == torch.float32
        close(loss, twin.double()(own(batches(GPT2))), f"loss in {dtype}", tolerance)


@pytest.mark.parametrize("optimize", ["speed"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2, 4])
@on_tp()
def test_rows_that_fill_up_the_vocabulary_are_no_words(tp, prescaled, optimize):
    """a9-5: 13 words, or one, over two or four ranks: the whole table has as many rows, and what was added stays zero
    while the others train, under an optimizer that decays weights too."""
    for vocabulary in (13, 1):
        options = {**GPT2, "tie_word_embeddings": False, "lm_head_bias": True, "vocab_size": vocabulary}
        module = DistributedTransformerLMHead(**options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            module(own(batches(options))).backward()
            optimizer.step()
        for param in (module.word_embedding.weight, module.lm_head.weight, module.lm_head.bias):
            assert gathered(param).shape[0] == vocabulary
            assert len(param) == -(-vocabulary // tp)
            start, stop = spec_of(param).ranges[0]
            assert not param[stop - start :].any()


@pytest.mark.parametrize("optimize", ["speed"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [1, 2])
@on_tp()
def test_head_and_table_are_one_parameter_when_tied(tp, prescaled, optimize):
    """Under two names in the state dict; still so when another module's parameter has been adopted."""
    module = DistributedTransformerLMHead(**GPT2)
    assert module.lm_head.weight is module.word_embedding.weight
    assert {"lm_head.weight", "word_embedding.weight"} <= set(module.state_dict())
    assert "lm_head.weight" not in dict(module.named_parameters())
    given = torch.nn.Parameter(torch.randn(13, 8))
    smp.set_tensor_parallelism(module, False)
    module.adopt("word_embedding.weight", given)
    assert module.lm_head.weight is given and module.word_embedding.weight is given
    untied = DistributedTransformerLMHead(**GPT2, tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.word_embedding.weight


@pytest.mark.parametrize("optimize", ["speed"])
@pytest.mark.parametrize("prescaled", [False])
@pytest.mark.parametrize("tp", [1, 2, 4])
@on_tp()
def test_initial_values_are_those_asked_for(tp, prescaled, optimize):
    """Tables and head normal with initializer_range; ranks seeded apart hold parts of one table."""
    torch.manual_seed(5 + tp_group().rank)
    options = {**GPT2, "vocab_size": 400, "initializer_range": 0.1, "tie_word_embeddings": False, "lm_head_bias": True}
    module = DistributedTransformerLMHead(**options)
    torch.manual_seed(5)
    first = torch.empty(400, 8).normal_(0, 0.1)
    assert torch.equal(gathered(module.word_embedding.weight), first)
    assert 0.09 < gathered(module.lm_head.weight).std() < 0.11
    assert 0.05 < module.position_embedding.weight.std() < 0.15
    assert not module.lm_head.bias.any() and module.layernorm.weight.eq(1).all()
    whole = smp.allgather(module.position_embedding.weight.detach(), smp.TP_GROUP)
    assert all(torch.equal(part, whole[0]) for part in whole)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_embedding_dropout_is_equal_where_hidden_states_are(tp, prescaled, optimize):
    """a1-1: one mask where every rank has the same hidden states, others where each has its part; also when one rank
    alone has drawn random numbers before. In evaluation there is none."""
    module = DistributedTransformerLMHead(
        **{**GPT2, "num_layers": 1, "add_lm_head": False, "final_layernorm": False}, embedding_dropout_prob=0.5
    ).double()
    if tp_group().rank == 0:
        torch.rand(7)
    hidden = torch.ones(4, 8, 8, dtype=torch.float64)
    dim = None if optimize == "speed" else int(prescaled)
    first, second = (module.embedding_dropout(hidden, dim) for _ in range(2))
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    masks = smp.allgather(first, smp.TP_GROUP)
    assert torch.equal(*masks) == (optimize == "speed")
    assert torch.equal(module.eval().embedding_dropout(hidden, dim), hidden)
    plain = DistributedTransformerLMHead(**{**GPT2, "hidden_dropout_prob": 0.25})
    assert plain.embedding_dropout.p == 0.25


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [1, 2])
@on_tp()
def test_wrong_inputs_are_refused_by_name(tp, prescaled, optimize):
    """On every rank, before or instead of a wrong number."""
    module = DistributedTransformerLMHead(**GPT2)
    ids, mask, _, _, labels = own(batches(GPT2))
    long = torch.zeros(2, 10, dtype=torch.long)
    for inputs, message in [
        (ids, "takes one tuple"),
        ((ids, mask), "got 2 elements"),
        ((None, mask, None, None, labels), "needs input_ids"),
        ((ids, mask, ids * 0, None, labels), "num_token_types=0"),
        ((long, None, None, None, None), "num_positions 8"),
        ((ids, mask, None, None, labels + 13), "is no class: there are 13"),
    ]:
        with pytest.raises(smp.SmpError, match=message):
            module(inputs)
    with pytest.raises(IndexError):
        module((ids + 13, mask, None, None, None))
    headless = DistributedTransformerLMHead(**GPT2, add_lm_head=False)
    with pytest.raises(smp.SmpError, match="add_lm_head=False"):
        headless((ids, mask, None, None, labels))
    crossed = DistributedTransformerLMHead(**GPT2, add_cross_attention=True)
    with pytest.raises(smp.SmpError, match="needs cross_states"):
        crossed((ids, mask, None, None, None, None, labels))
    with pytest.raises(smp.SmpError, match="tie_word_embedings"):
        DistributedTransformerLMHead(**GPT2, tie_word_embedings=False)


WITHOUT_TABLES: dict[str, dict[str, Any]] = {
    "llama": {
        **{"rotary_dim": 4, "num_key_value_heads": 4, "norm": "rms", "gated_mlp": True, "activation": "silu"},
        **{"use_qkv_bias": False, "use_attention_dense_bias": False, "use_mlp_bias": False},
    },
    "gptj": {"rotary_dim": 2, "rotary_interleaved": True, "parallel_attention": True, "single_pre_layernorm": True},
    "bloom": {"use_alibi": True, "embedding_layernorm": True, "attention_window": [3, None]},
}


@pytest.mark.parametrize("name", WITHOUT_TABLES)
@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2])
@on_ranks(2)
def test_models_without_a_table_of_positions_equal_their_twin(tp, prescaled, optimize, name):
    """Positions that are not 0, 1, 2, .. reach the layers; options of layers, one window for each."""
    setup(tp, prescaled, optimize)
    extra = WITHOUT_TABLES[name]
    options = {**GPT2, "attention_head_size": 4, "num_positions": 0, "tie_word_embeddings": False, **extra}

    def twin(w: dict[str, Tensor], inputs: tuple[Any, ...]) -> Tensor:
        ids, positions = inputs
        norms = LayerTwin(w, **options)
        x = w["word_embedding.weight"][ids]
        x = norms.norm(x, "embedding_layernorm") if options.get("embedding_layernorm") else x
        for index in range(2):
            window = options["attention_window"][index] if "attention_window" in options else None
            layer = LayerTwin(w, **{**options, "attention_window": window, "layer_idx": index})
            x = layer.layer(x, None, f"transformer.seq_layers.{index}.", ids=positions)
        return norms.norm(x, "layernorm") @ w["lm_head.weight"].t()

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return torch.randint(13, (2, 4), generator=generator), torch.randint(8, (2, 4), generator=generator)

    assert_equals_twin(
        lambda: DistributedTransformerLMHead(**options),
        inputs,
        lambda module, x: module((x[0], None, None, x[1], None)),
        twin,
    )
    runtime.reset()


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.seen |= {tuple(tensor.shape) for tensor in made if isinstance(tensor, Tensor)}
        return result


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_no_rank_ever_has_whole_logits(tp, prescaled, optimize):
    """From ids to the gradients: nothing that any operation makes has the vocabulary as a dimension."""
    options = {**GPT2, "vocab_size": 1001, "lm_head_bias": True}
    module = DistributedTransformerLMHead(**options)
    batch = own(batches(options))
    with Shapes() as shapes:
        module(batch).backward()
    assert any(shape[-1:] == (501,) for shape in shapes.seen)
    assert max(max(shape, default=0) for shape in shapes.seen) < 1001
    with Shapes() as shapes:
        module((*batch[:-1], None))
    assert any(shape[-1:] == (1001,) for shape in shapes.seen)


@pytest.mark.parametrize("launcher", ["torchrun"])
@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("tp", [2])
@on_tp()
def test_the_launcher_does_not_matter(tp, prescaled, optimize, launcher):
    """Over process groups, without MPI."""
    twin = twin_of(GPT2)
    module = distributed(twin)
    parts = batches(GPT2)
    loss, losses = module(own(parts)), [twin(part) for part in parts]
    close(loss, own(losses), "loss")
    loss.backward()
    sum(losses).backward()
    assert_same_gradients(module, twin)
