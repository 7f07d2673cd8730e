"""GPT-2, GPT-Neo, GPT-J and GPT-NeoX of `transformers`, split as a whole or layer by layer, against one process."""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smp
from smp import runtime
from smp.activation import is_checkpointed
from smp.errors import StepError
from smp.nn import DistributedTransformerLayer, DistributedTransformerLMHead
from smp.tp import families
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.parity import models
from tests.parity.compare import Setup, assert_close, build, check
from tests.parity.zoo import Case

transformers = pytest.importorskip("transformers")

VOCABULARY = models.VOCABULARY
EXACT = {"dtype": torch.float64}


class InFloat64:
    """What modules of transformers see of torch: they compute some things in float32 whatever the model's dtype, which
    would hide differences."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def exact_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@contextmanager
def exactly() -> Iterator[None]:
    """Nothing of what models of these families compute is in float32."""
    files = [importlib.import_module(module) for module in families._DECLARED_IN if "gpt" in module]
    for file in files:
        file.torch = InFloat64()
    try:
        yield
    finally:
        for file in files:
            file.torch = torch


def varied(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model with parameters of no special values, and a loss in its own dtype."""

    def made() -> nn.Module:
        model = make()
        if hasattr(model, "lm_head") or hasattr(model, "embed_out"):
            model.loss_function = exact_loss
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
        return model

    return made


def gpt2(cls: Any = transformers.GPT2LMHeadModel, **switches: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 4, **switches}
    return cls(transformers.GPT2Config(**{"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **sizes}))


def gptneo(cls: Any = transformers.GPTNeoForCausalLM, **switches: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "hidden_size": 16, "num_layers": 4}
    kinds = {"attention_types": [[["global", "local"], 2]], "num_heads": 4, "window_size": 3}
    return cls(transformers.GPTNeoConfig(**{"attention_dropout": 0, "resid_dropout": 0, **sizes, **kinds, **switches}))


def gptj(cls: Any = transformers.GPTJForCausalLM, **switches: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 4, "rotary_dim": 2}
    return cls(transformers.GPTJConfig(**{**sizes, **switches}))


def gptneox(cls: Any = transformers.GPTNeoXForCausalLM, **switches: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    return cls(transformers.GPTNeoXConfig(**{**sizes, "intermediate_size": 32, "rotary_pct": 0.5, **switches}))


GPT_PLACES = [("transformer.wte", 0), *models.spread("transformer.h.{}", 4), ("transformer.ln_f", 0.9)]
NEOX_PLACES = [("gpt_neox.embed_in", 0), *models.spread("gpt_neox.layers.{}", 4), ("gpt_neox.final_layer_norm", 0.9)]
MODELS = {"gpt2": gpt2, "gptneo": gptneo, "gptj": gptj, "gptneox": gptneox}
EAGER = {"attn_implementation": "eager"}


def text(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """With padding in front, so that some places see nothing; every place has a label."""
    ids = torch.randint(1, VOCABULARY, (rows, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def case(name: str, batch: Any = text, **switches: Any) -> Case:
    places = NEOX_PLACES if name == "gptneox" else GPT_PLACES
    return Case(varied(lambda: MODELS[name](**switches)), batch, places, models.loss_of)


def trains_alike(what: Case, setup: Setup) -> None:
    with log_lines() as lines, exactly() if setup.dtype == torch.float64 else nullcontext():
        check(what, setup, prepare=smp.set_tensor_parallelism)
    assert not any("leaves" in line for line in lines), lines


# Families on all layouts


@pytest.mark.parametrize("prescaled", [False, True], ids=["joined", "prescaled"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, timeout=180)
def test_families_train_over_two_parts(name, prescaled):
    """In float64, with padding, labels and the cache left on; both ways of communicating."""
    for optimize in ("speed", "memory"):
        trains_alike(
            case(name), Setup(tp=2, microbatches=2, prescaled=prescaled, config={"optimize": optimize}, **EXACT)
        )


@pytest.mark.parametrize("name", MODELS)
@on_ranks(4, timeout=180)
def test_families_train_over_two_parts_and_two_stages(name):
    """A stage boundary between layers, placed by hand and automatically."""
    for auto in (False, True):
        trains_alike(case(name), Setup(pp=2, tp=2, microbatches=2, auto=auto, **EXACT))


# Switches of configurations


def with_everything(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Positions that do not start at 0, and token types, which are looked up in the table of words."""
    batch = text(rows, generator)
    positions = torch.arange(8).expand(rows, 8) + torch.randint(0, 4, (rows, 1), generator=generator)
    return {**batch, "position_ids": positions, "token_type_ids": torch.randint(0, 2, (rows, 8), generator=generator)}


def with_positions(rows: int, generator: torch.Generator) -> dict[str, Any]:
    batch = with_everything(rows, generator)
    return {name: value for name, value in batch.items() if name != "token_type_ids"}


def with_states(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Of an encoder."""
    mask = torch.ones(rows, 5)
    mask[0, 3:] = 0
    states = torch.randn(rows, 5, 16, generator=generator)
    return {**text(rows, generator), "encoder_hidden_states": states, "encoder_attention_mask": mask}


SWITCHES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gpt2 ids": ("gpt2", with_everything, {}),
    "gpt2 eager": ("gpt2", text, EAGER),
    "gpt2 by layer": ("gpt2", text, {"scale_attn_by_inverse_layer_idx": True, **EAGER}),
    "gpt2 by layer, unheeded": ("gpt2", text, {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 unscaled": ("gpt2", text, {"scale_attn_weights": False, **EAGER}),
    "gpt2 untied": ("gpt2", text, {"tie_word_embeddings": False, "n_inner": 24, "activation_function": "relu"}),
    "gpt2 cross": ("gpt2", with_states, {"add_cross_attention": True, "layer_norm_epsilon": 1e-3}),
    "gpt2 cross eager": ("gpt2", with_states, {"add_cross_attention": True, **EAGER}),
    "gptneo ids": ("gptneo", with_everything, {}),
    "gptneo global": ("gptneo", text, {"attention_types": [[["global"], 4]], "intermediate_size": 24}),
    "gptneo local": ("gptneo", text, {"attention_types": [[["local"], 4]], "window_size": 2}),
    "gptneo silu": ("gptneo", text, {"activation_function": "silu", "tie_word_embeddings": False}),
    "gptj ids": ("gptj", with_everything, {}),
    "gptj tied": ("gptj", text, {"tie_word_embeddings": True, "rotary_dim": 4, "n_inner": 24}),
    "gptneox ids": ("gptneox", with_positions, EAGER),
    "gptneox one after the other": ("gptneox", text, {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gptneox no bias": ("gptneox", text, {"attention_bias": False, "rotary_pct": 1.0, "rotary_emb_base": 100}),
}


@pytest.mark.parametrize("switch", SWITCHES)
@on_ranks(2, timeout=60)
def test_switches_are_honoured(switch):
    """Each computes what it makes the original compute."""
    name, batch, switches = SWITCHES[switch]
    prescaled = list(SWITCHES).index(switch) % 2 == 0
    trains_alike(case(name, batch, **switches), Setup(tp=2, prescaled=prescaled, **EXACT))


@on_ranks(2, timeout=60)
def test_attention_in_float32_is_honoured():
    """`reorder_and_upcast_attn` of the eager kernel."""
    switches = {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True, **EAGER}
    trains_alike(Case(lambda: gpt2(**switches), text, GPT_PLACES, models.loss_of), Setup(tp=2))


REFUSED = {
    "activation_function Tanh": lambda: gpt2(activation_function="tanh"),
    "config.output_attentions": lambda: gptneo(output_attentions=True),
    "num_attention_heads 3": lambda: gptj(n_head=3, n_embd=12),
    "rope_scaling 'linear'": lambda: gptneox(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "config.output_hidden_states": lambda: gptneox(output_hidden_states=True),
    "epsilons of norms differ": lambda: another_epsilon(gpt2()),
    "adapter": lambda: adapted(gptj()),
}


def another_epsilon(model: nn.Module) -> nn.Module:
    model.transformer.h[2].ln_2.eps = 0.1
    return model


def adapted(model: nn.Module) -> nn.Module:
    model.transformer.h[1].adapter = nn.Linear(2, 2)
    return model


@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_what_the_twin_does_not_know_is_left_whole():
    """With one warning that names the switch."""
    for says, make in REFUSED.items():
        runtime.get().model = None
        model = make()
        smp.set_tensor_parallelism(model)
        with log_lines() as lines:
            whole = smp.DistributedModel(model).module
        assert whole is model, says
        assert smp.rank() != 0 or any("leaves the model whole" in line and says in line for line in lines), lines


# Calls and results


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(lambda a: a["tp"], config=lambda a: {"tensor_parallel_degree": a["tp"], "ddp": True})
def test_results_are_as_the_original_gives_them(tp):
    """In evaluation loss and logits, in training the loss alone; tuples; what cannot be had is refused by name."""
    for name in MODELS:
        runtime.get().model = None
        whole, module = (build(case(name), torch.float64).eval() for _ in range(2))
        smp.set_tensor_parallelism(module)
        with log_lines() as lines:
            model = smp.DistributedModel(module)
        assert isinstance(model.module, DistributedTransformerLMHead), lines
        assert len(model.module.transformer.seq_layers) == 4
        assert model.module.config is module.config
        batch = text(3, torch.Generator().manual_seed(smp.rank()))
        with torch.no_grad(), exactly():
            got, want = model(**batch), whole(**batch, use_cache=False)
            assert type(got) is type(want)
            assert_close(got.logits, want.logits, 1e-9, name)
            assert_close(got["loss"], want.loss, 1e-9, name)
            assert_close(model(batch["input_ids"]).logits, whole(batch["input_ids"]).logits, 1e-9, name)
            loss, logits = model(**batch, return_dict=False)
            assert_close(logits, want.logits, 1e-9, name)
            loss = model(**batch, num_items_in_batch=5).loss
            assert_close(loss, want.loss * 21 / 5, 1e-9, name)
            unlabelled = {**batch, "labels": torch.full_like(batch["labels"], -100)}
            assert float(model(**unlabelled, num_items_in_batch=torch.tensor(5)).loss) == 0.0
        for method in ("generate", "save_pretrained"):
            with pytest.raises(StepError, match=f"^{method}: .*plain"):
                getattr(model.module, method)(batch["input_ids"])
        with torch.no_grad(), exactly():
            last = {key: value for key, value in batch.items() if key != "labels"}
            assert_close(model(**last, logits_to_keep=2).logits, want.logits[:, -2:], 1e-9, name)
        model.train()
        out = model(**batch, use_cache=True)
        assert out.logits is None
        assert out.past_key_values is None
        assert len(model(**batch, return_dict=False)) == 1
        for wrong in ({"inputs_embeds": torch.zeros(3, 8, 16)}, {"output_attentions": True}, {"head_mask": 1}):
            with pytest.raises(StepError, match=next(iter(wrong))):
                model(**batch, **wrong)
        cache = transformers.DynamicCache()
        model(**batch, past_key_values=cache)
        cache.update(torch.zeros(3, 4, 2, 4), torch.zeros(3, 4, 2, 4), 0)
        with pytest.raises(StepError, match="past_key_values"):
            model(**batch, past_key_values=cache)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, timeout=60)
def test_checkpointing_of_transformers_is_heeded(name):
    """As smp's own: layers are run again in backward, with the same result; under other heads too."""

    def make(cls: Any = None) -> nn.Module:
        model = varied(lambda: MODELS[name](*[] if cls is None else [cls], pad_token_id=0))()
        model.gradient_checkpointing_enable()
        return model

    for cls, batch in ((None, text), (classifier_of(name), classified)):
        with exactly():
            what = Case(lambda cls=cls: make(cls), batch, [], models.loss_of)
            check(what, Setup(tp=2, steps=1, **EXACT), prepare=smp.set_tensor_parallelism)
        runtime.reset()
        smp.init({"tensor_parallel_degree": 2, "ddp": True})
        module = make(cls)
        smp.set_tensor_parallelism(module)
        parts = smp.DistributedModel(module).modules()
        layers = [part for part in parts if isinstance(part, DistributedTransformerLayer)]
        assert len(layers) == 4
        assert all(is_checkpointed(layer) for layer in layers)
        runtime.reset()


# State dicts


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_state_dicts_go_over_and_back(name):
    """Bit by bit, every key; a plain model's state dict loads into the split one and back, translated or as it is."""
    for switches in ({}, {"tie_word_embeddings": name in ("gptj", "gptneox")}):
        runtime.get().model = None
        torch.manual_seed(smp.rank())
        module, other = MODELS[name](**switches), MODELS[name](**switches)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        smp.set_tensor_parallelism(module)
        model = smp.DistributedModel(module)
        [(to_theirs, to_ours)] = smp.state.module_manager.translate_functions
        public = getattr(smp.nn.huggingface, name)
        assert to_theirs == getattr(public, f"translate_state_dict_to_hf_{name}")
        assert to_ours == getattr(public, f"translate_hf_state_dict_to_smdistributed_{name}")
        theirs = to_theirs(model.state_dict(), max_seq_len=16)
        assert set(theirs) == set(before)
        assert smp.tp_rank() != 0 or all(torch.equal(theirs[key], before[key]) for key in before)
        again = to_theirs(to_ours(theirs))
        assert all(torch.equal(theirs[key], again[key]) for key in before)
        want = smp.allgather(dict(other.state_dict()), smp.WORLD)[0]
        for given in (want, to_ours(want), {**to_ours(want), "_smp_is_partial": False}):
            model.load_state_dict(theirs)
            got = to_theirs(model.state_dict())
            assert not any(torch.equal(value, want[key]) for key, value in got.items() if value.dim() > 1)
            assert model.load_state_dict(given) == ([], [])
            got = to_theirs(model.state_dict())
            assert all(torch.equal(got[key], want[key]) for key in want)
        other.load_state_dict(theirs)
        own = set(to_ours(before))
        assert set(to_ours(model.state_dict())) == own  # our names mean nothing else in theirs


@on_ranks(4, timeout=180)
def test_exported_models_load_in_plain_transformers(tmp_path):
    """From two parts and two stages, a vocabulary that does not divide, tied and untied (a9-5): no key is missing or
    too much, no tensor has another shape, and logits are the same."""
    for name, tied in [("gpt2", True), ("gpt2", False), ("gptneo", True), ("gptj", False), ("gptneox", True)]:
        runtime.reset()
        smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "ddp": True})
        exports(name, tied, tmp_path / f"{name} {tied}")
    runtime.reset()


def exports(name: str, tied: bool, path: Path) -> None:
    torch.manual_seed(5)
    module, plain = (MODELS[name](vocab_size=101, tie_word_embeddings=tied) for _ in range(2))
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module).eval()
    batch = text(2, torch.Generator().manual_seed(smp.dp_rank()))
    del batch["labels"]

    @smp.step
    def logits(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model(**batch).logits

    got = logits(batch).concat()
    [(to_theirs, _)] = smp.state.module_manager.translate_functions
    theirs = to_theirs(model.state_dict(), consume=True)
    if smp.rank() == 0:
        plain.save_pretrained(path, state_dict=theirs)
    smp.barrier()
    loaded, info = type(plain).from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert_close(got, loaded.eval()(**batch).logits, 1e-5, f"{name}, tied {tied}")


# Layers in other models


def classifier_of(name: str) -> Any:
    return {
        "gpt2": transformers.GPT2ForSequenceClassification,
        "gptneo": transformers.GPTNeoForSequenceClassification,
        "gptj": transformers.GPTJForSequenceClassification,
        "gptneox": transformers.GPTNeoXForSequenceClassification,
    }[name]


def classified(rows: int, generator: torch.Generator) -> dict[str, Any]:
    batch = text(rows, generator)
    return {**batch, "labels": torch.randint(0, 2, (rows,), generator=generator)}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(4, timeout=180)
def test_layers_are_replaced_under_other_heads(name):
    """A classifier, on two parts and on two stages as well."""
    cls = classifier_of(name)
    places = NEOX_PLACES if name == "gptneox" else GPT_PLACES
    for switches in ({}, EAGER) if name in ("gpt2", "gptneox") else ({},):
        make = varied(lambda switches=switches: MODELS[name](cls, pad_token_id=0, **switches))
        what = Case(make, classified, [*places, ("score", 0.9)], models.loss_of)
        trains_alike(what, Setup(tp=2, **EXACT))
        trains_alike(what, Setup(tp=2, pp=2, microbatches=2, **EXACT))


@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_layers_say_what_they_cannot_give():
    """Generation would need keys and values of earlier calls."""
    module = gpt2(transformers.GPT2DoubleHeadsModel).eval()
    smp.set_tensor_parallelism(module.transformer)
    model = smp.DistributedModel(module)
    assert isinstance(module.transformer.h[0], DistributedTransformerLayer)
    ids = torch.randint(1, VOCABULARY, (2, 8))
    first = model(ids)
    with pytest.raises(StepError, match="past_key_values"):
        model(ids[:, -1:], past_key_values=first.past_key_values)


@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_layers_tell_hidden_states_and_refuse_attentions():
    """Also where a model gathers them on the side, and where it is asked by its configuration."""
    for name in MODELS:
        runtime.get().model = None
        module = MODELS[name](classifier_of(name), pad_token_id=0, **EAGER).eval()
        whole = copy.deepcopy(module)
        smp.set_tensor_parallelism(module)
        model = smp.DistributedModel(module)
        assert sum(isinstance(part, DistributedTransformerLayer) for part in module.modules()) == 4
        batch = classified(3, torch.Generator().manual_seed(smp.rank()))
        got = model(**batch, output_hidden_states=True).hidden_states
        want = whole(**batch, output_hidden_states=True).hidden_states
        assert len(got) == len(want) == 5
        seen = batch["attention_mask"].bool()
        assert all(torch.allclose(a[seen], b[seen], atol=1e-5) for a, b in zip(got, want)), name
        with pytest.raises(StepError, match="output_attentions"):
            model(**batch, output_attentions=True)
        module.config.output_attentions = True
        with pytest.raises(StepError, match="output_attentions"):
            model(**batch)


# Delayed initialisation


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, config={"tensor_parallel_degree": 2, "ddp": True})
def test_delayed_parameters_start_as_those_of_one_process(name):
    """The original's own initialisation, one whole tensor at a time."""
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
        torch.manual_seed(3)
        module, whole = MODELS[name](), MODELS[name]()
    smp.tp.delayed.materialize(whole)
    model = smp.DistributedModel(module)
    assert isinstance(model.module, DistributedTransformerLMHead)
    [(to_theirs, _)] = smp.state.module_manager.translate_functions
    want = whole.state_dict()
    for key, value in to_theirs(model.state_dict()).items():
        kept = "c_" in key and name == "gpt2"  # Conv1D knows no way to initialise itself, so it is not delayed
        assert kept or torch.equal(value, want[key]), key
