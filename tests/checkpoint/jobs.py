"""Small training jobs on any grid, to be saved on one and resumed on another, and what they hold as whole tensors.

A job trains one of a few models on batches that depend on the step's number alone, so that every grid computes the
same losses. `whole_tensors` puts weights, masters and optimizer states together from the parts that the ranks hold,
under the names of the user's module, by nothing but the parts' own description: it knows nothing of checkpoints.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp import runtime
from smp.tp.shard import spec_of
from tests.examples.test_train_gpt import load_example

ROWS, LENGTH, VOCABULARY, WIDTH = 8, 8, 64, 16
RATE = 0.01
Tensors = dict[tuple[str, str], Tensor]  # by kind ("weight", "master" or the key of an optimizer state) and name


@dataclass(frozen=True)
class Grid:
    """Degrees and what else a job may change between two runs. `half`: `fp16`, `bf16` or nothing."""

    pp: int = 1
    tp: int = 1
    microbatches: int = 2
    sharded: bool = False
    half: str = ""

    def config(self) -> dict[str, Any]:
        degrees = {"pipeline_parallel_degree": self.pp, "tensor_parallel_degree": self.tp, "ddp": True}
        more = {"microbatches": self.microbatches, "shard_optimizer_state": self.sharded}
        return {**degrees, **more, **({self.half: True} if self.half else {})}


@dataclass(frozen=True)
class Shape:
    """A model, the part of it that is split, and how its parameters are called when it is and when it is not."""

    build: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module, Tensor], Tensor]
    to_users_names: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@functools.cache
def example() -> Any:
    return load_example()


def gpt() -> nn.Module:
    """The model of the example: under tensor parallelism it is replaced, and its parameters have other names."""
    return example().GPT(layers=4, width=WIDTH, heads=4, context=LENGTH)


def gpt_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, ids.roll(-1, 1))


def gpt_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = example().SplitGPT.NAMES
    users = {".".join(names.get(part, part) for part in name.split(".")): name for name, _ in gpt().named_parameters()}
    return {users.get(name, name): tensor for name, tensor in tensors.items()}


class Body(nn.Module):
    """Linears and norms that are split one by one, under their own names; the last linear is left whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        smp.set_tensor_parallelism(self.head, False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def body_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def gpt2() -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 4, "n_head": 4}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def gpt2_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def gpt2_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from smp.nn.huggingface import gpt2 as family

    translated = dict(tensors)
    if "word_embedding.weight" in tensors:
        translated = family.translate_state_dict_to_hf_gpt2(tensors)
    return {name: value for name, value in translated.items() if name != "lm_head.weight"}  # tied to the embedding


def bert() -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropout, num_attention_heads=4))


SHAPES = {
    "gpt": Shape(gpt, gpt_loss, gpt_names),
    "body": Shape(Body, body_loss, lambda tensors: tensors),
    "gpt2": Shape(gpt2, gpt2_loss, gpt2_names),
    "bert": Shape(bert, gpt2_loss, lambda tensors: tensors),
}


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.8, 0.9))


class Job:
    """One run, as a process of its own would make it, of this rank's share of the batches."""

    def __init__(
        self,
        shape: str,
        grid: Grid,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = adam,
    ) -> None:
        runtime.reset()
        smp.init(grid.config())
        torch.manual_seed(seed)
        self.shape, self.grid = SHAPES[shape], grid
        with smp.tensor_parallelism(enabled=grid.tp > 1):
            module = self.shape.build()
        self.model: Any = smp.DistributedModel(module.to(torch.float32 if grid.half else dtype))
        parameters = list(self.model.parameters())
        decayed, others = ([p for p in parameters if (p.dim() > 1) is flag] for flag in (True, False))
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**8, "scale_window": 2}}
        self.optimizer: Any = smp.DistributedOptimizer(make(groups), **(scale if grid.half == "fp16" else {}))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer.optimizer, lambda n: 1 / (1 + n))
        self.number = 0
        loss_of = self.shape.loss_of

        @smp.step
        def train(model: nn.Module, ids: Tensor) -> Tensor:
            loss = loss_of(model, ids)
            model.backward(loss)  # type: ignore[operator]
            return loss

        self._train = train

    def step(self) -> tuple[float, list[float]]:
        """One training step: the job's loss, and the learning rates that the update used."""
        generator = torch.Generator().manual_seed(1000 + self.number)
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        self.optimizer.zero_grad()
        loss = self._train(self.model, ids.chunk(smp.dp_size())[smp.dp_rank()]).reduce_mean()
        self.optimizer.clip_master_grads(1.0)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.step()
        self.scheduler.step()
        self.number += 1
        losses = smp.allgather(float(loss), smp.DP_GROUP)
        return sum(losses) / len(losses), rates

    def save(self, path: Path, tag: str, **options: Any) -> None:
        content = {"number": self.number, "scheduler": self.scheduler.state_dict()}
        smp.save_checkpoint(path, tag, model=self.model, optimizer=self.optimizer, user_content=content, **options)

    def resume(self, path: Path, **options: Any) -> list[Tensors]:
        """Resumes. The list gets what the job holds as soon as the model is partitioned, before it trains."""
        content = smp.resume_from_checkpoint(path, **options)
        self.number = content["number"]
        self.scheduler.load_state_dict(content["scheduler"])
        found: list[Tensors] = []
        self.model.register_post_partition_hook(lambda *_: found.append(self.whole_tensors()))
        return found

    def local_tensors(self) -> Tensors:
        """What this rank holds, under the names that parameters have here."""
        held: Tensors = {("weight", name): p.detach() for name, p in self.model.local_named_parameters()}
        held |= {("master", name): p.detach() for name, p in self.optimizer.masters_by_name().items()}
        names = self.optimizer._names()
        for parameter, state in self.optimizer.state.items():
            held |= {(key, names[id(parameter)]): torch.as_tensor(value) for key, value in state.items()}
        return held

    def whole_tensors(self) -> Tensors:
        """What all ranks hold together, under the user's names; ranks that hold the same must agree bit for bit."""
        specs = {name: spec_of(p) for name, p in self.model.module.named_parameters()}
        parts: dict[tuple[str, str], dict[int, Tensor]] = {}
        for rank_has in smp.allgather((smp.tp_rank(), self.local_tensors()), smp.WORLD):
            tp_rank, tensors = rank_has
            for key, tensor in tensors.items():
                spec = specs[key[1]]
                cut = spec is not None and tuple(tensor.shape) == spec.local_shape
                seen = parts.setdefault(key, {}).setdefault(tp_rank if cut else 0, tensor)
                assert torch.equal(seen, tensor), f"ranks that hold the same part of {key} differ"
        kinds: dict[str, dict[str, Tensor]] = {}
        for (kind, name), pieces in parts.items():
            spec = specs[name]
            cut = spec is not None and next(iter(pieces.values())).dim() > 0
            whole = spec.merge([pieces[i] for i in range(spec.num_parts)]) if cut and spec is not None else pieces[0]
            kinds.setdefault(kind, {})[name] = whole
        scalars = {kind for kind, tensors in kinds.items() if all(t.dim() == 0 for t in tensors.values())}
        renamed = {k: v if k in scalars else self.shape.to_users_names(v) for k, v in kinds.items()}
        merged: Tensors = {}
        for kind, tensors in renamed.items():
            if kind in scalars:  # names are those of this grid's module; one value tells all that there is to say
                values = {float(t) for t in tensors.values()}
                assert len(values) == 1, f"{kind} is {values}"
                merged[(kind, "")] = torch.tensor(values.pop())
            else:
                merged |= {(kind, name): tensor for name, tensor in tensors.items()}
        return merged


def assert_equal(got: Tensors, want: Tensors) -> None:
    """The same keys and, bit for bit, the same values."""
    assert set(got) == set(want), f"only here {set(got) - set(want)}, missing {set(want) - set(got)}"
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype, f"{key}: {got[key].dtype} instead of {tensor.dtype}"
        assert torch.equal(got[key], tensor), f"{key} differs by {float((got[key] - tensor).abs().max())}"
