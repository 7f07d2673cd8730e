"""Trains a byte-level GPT, split over processes by tensor, pipeline and data parallelism.

    python examples/train_gpt.py                                               # one process
    mpirun -np 4 python examples/train_gpt.py --tensor 2 --pipeline 2          # four: 2 x 2
    mpirun -np 4 python examples/train_gpt.py --tensor 2 --pipeline 2 --resume # goes on where the last run stopped
    mpirun -np 4 python examples/train_gpt.py --pipeline 4 --resume --bf16     # ... on other degrees, in half precision

The model and the loop are plain PyTorch; what `smp` adds is marked by the name. With `--tensor` the model is replaced
as a whole by the language model of `smp.nn`, which starts with its weights and sends less than layers that are split
one by one. The text is Python's standard library as found on this machine, or what `--data` names. Every combination
of degrees trains the same model on the same batches.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import smp

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SplitGPT(smp.nn.DistributedTransformerLMHead):
    """What GPT is with tensor parallelism. It takes over the Parameter objects of the GPT in whose place it comes."""

    NAMES = {
        **{"tokens": "word_embedding", "positions": "position_embedding", "norm": "layernorm", "head": "lm_head"},
        **{"blocks": "transformer.seq_layers", "norm1": "attention.pre_layernorm", "norm2": "output.pre_layernorm"},
        **{"qkv": "attention.qkv", "out": "attention.dense", "up": "output.dense1", "down": "output.dense2"},
    }

    def carry_over(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.adopt(".".join(self.NAMES.get(part, part) for part in name.split(".")), parameter)


def split_gpt_arguments(layers: int, width: int, heads: int, context: int) -> tuple[tuple[()], dict[str, Any]]:
    """From the arguments of GPT to those of SplitGPT."""
    sizes = {"num_layers": layers, "num_attention_heads": heads, "attention_head_size": width // heads}
    sizes |= {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": VOCABULARY, "num_positions": context}
    no_dropout = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    kind = {"causal_mask_size": context, "pre_layernorm": True, "post_layernorm": False}
    return (), {**sizes, **no_dropout, **kind, "tie_word_embeddings": False, "shift_labels": False}


def split_gpt_inputs(text: Tensor, target: Tensor | None = None) -> tuple[tuple[Any], dict[str, Any]]:
    """From what GPT is called with to what SplitGPT is: ids, mask, token types, positions, labels."""
    return ((text, None, None, None, target),), {}


@smp.tp_register(SplitGPT, init_hook=split_gpt_arguments, forward_hook=split_gpt_inputs)
class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in self.tokens, self.positions:
            nn.init.normal_(embedding.weight, std=0.1)
        for block in self.blocks:  # what is added up grows with the number of blocks
            for linear in block.out, block.down:
                nn.init.normal_(linear.weight, std=(2 * layers * linear.in_features) ** -0.5)

    def forward(self, text: Tensor, target: Tensor | None = None) -> Tensor:
        """Bytes [batch, length] -> logits of each next byte [batch, length, 256]; with these as `target`, the loss."""
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if target is None else F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Text:
    """Bytes cut into blocks of `context + 1`, read in a shuffled order that is a function of seed and epoch."""

    def __init__(self, files: list[Path], context: int, seed: int = 0) -> None:
        text = bytearray(b"\n".join(path.read_bytes() for path in files))
        self.bytes = torch.frombuffer(text, dtype=torch.uint8)
        self.num_blocks = (len(text) - 1) // context
        self.context, self.seed = context, seed
        if self.num_blocks < 1:
            raise SystemExit(f"the text is shorter than one block of {context + 1} bytes")

    def batch(self, position: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [size, context], of the blocks number `position` and following."""
        numbers = torch.arange(position, position + size)
        epochs = (numbers // self.num_blocks).unique().tolist()
        order = {epoch: self._order(epoch) for epoch in epochs}
        starts = [int(order[n // self.num_blocks][n % self.num_blocks]) * self.context for n in numbers.tolist()]
        blocks = torch.stack([self.bytes[start : start + self.context + 1] for start in starts]).long()
        return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(self.seed * 1000 + epoch))

    def unigram_entropy(self) -> float:
        """What the best guess that ignores context costs, in nats per byte."""
        p = torch.bincount(self.bytes.int(), minlength=VOCABULARY).double() / len(self.bytes)
        return -float(torch.xlogy(p, p).sum())


def find_text(data: Path | None) -> tuple[list[Path], list[Path]]:
    """Training and validation files: every tenth file is for validation."""
    root = data or Path(sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else sorted(root.glob("*.py" if data is None else "**/*"))
    files = [path for path in files if path.is_file()]
    if len(files) < 2:
        raise SystemExit(f"{root} holds {len(files)} files; text is split by file, so at least two are needed")
    step = min(10, len(files))
    return [f for i, f in enumerate(files) if i % step != step - 1], files[step - 1 :: step]


@smp.step
def train_step(model: nn.Module, text: Tensor, target: Tensor) -> Tensor:
    loss = model(text, target)
    model.backward(loss)
    return loss


@smp.step
def validation_step(model: nn.Module, text: Tensor, target: Tensor) -> Tensor:
    return model(text, target)


@smp.step(microbatches=1)
def next_byte_step(model: nn.Module, text: Tensor) -> Tensor:
    return model(text)[:, -1]


def mean_over_replicas(value: Tensor) -> float:
    """The mean of a scalar over the ranks that train on different batches."""
    values = smp.allgather(float(value), smp.DP_GROUP)
    return sum(values) / len(values)


def own_part(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The rows of the global batch that this rank's model replica trains on."""
    text, target = (tensor.chunk(smp.dp_size())[smp.dp_rank()] for tensor in batch)
    return text, target


@torch.no_grad()
def validate(model: nn.Module, text: Text, args: argparse.Namespace) -> float:
    model.eval()
    losses = [
        mean_over_replicas(validation_step(model, *own_part(text.batch(i * args.batch, args.batch))).reduce_mean())
        for i in range(args.validation_batches)
    ]
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: nn.Module, prompt: str, length: int, args: argparse.Namespace) -> str:
    """Text that goes on from `prompt`, drawn byte by byte."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = list(prompt.encode())
    for _ in range(length):
        context = torch.tensor([text[-args.context :]])
        logits = next_byte_step(model, context).concat()[0].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    model.train()
    return bytes(text).decode(errors="replace")


def show_partition(model: Any, optimizer: Any = None) -> None:
    """Prints which modules, and how many parameters, each rank holds."""
    parts: dict[str, int] = {}
    for name, parameter in model.local_named_parameters():
        levels = name.split(".")
        module = ".".join(levels[: next((i + 1 for i, level in enumerate(levels) if level.isdigit()), 1)])
        parts[module] = parts.get(module, 0) + parameter.numel()
    rows = smp.allgather((smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), parts), smp.WORLD)
    if smp.rank() == 0:
        for rank, (pp, tp, rdp, held) in enumerate(rows):
            print(
                f"rank {rank}: stage {pp}, tensor part {tp}, replica {rdp}: {sum(held.values()):,} parameters in "
                f"{', '.join(held) or 'nothing'}",
                flush=True,
            )


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up over the first 20 steps, then a cosine down to a tenth; a factor of --lr."""
    return min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * min(step / args.steps, 1)))


def progress(first: int, last: int) -> Iterator[tuple[int, tqdm]]:
    bar = tqdm(total=last, initial=first, unit="step", mininterval=1.0, disable=smp.rank() != 0, dynamic_ncols=True)
    with bar:
        for step in range(first, last):
            yield step, bar
            bar.update()


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    torch.manual_seed(args.seed)
    with smp.tensor_parallelism(enabled=args.tensor > 1):
        model = GPT(args.layers, args.width, args.heads, args.context)
    model = smp.DistributedModel(model)
    model.register_post_partition_hook(show_partition)
    adam = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**16, "scale_window": 100}}
    return model, smp.DistributedOptimizer(adam, **(scale if args.fp16 else {}))


def state_of_training(optimizer: Any, norm: float, args: argparse.Namespace) -> str:
    """What the progress bar says about the last update."""
    skipped = ", skipped" if optimizer.step_was_skipped else ""
    scale = f", loss scale {optimizer.loss_scale:g}" if args.fp16 else ""
    return f"gradient norm {norm:.2f}{skipped}{scale}"


def train(args: argparse.Namespace) -> None:
    train_files, validation_files = find_text(args.data)
    text, validation = Text(train_files, args.context, args.seed), Text(validation_files, args.context)
    if args.batch % smp.dp_size():
        raise SystemExit(f"--batch {args.batch} cannot be divided among the {smp.dp_size()} ranks of each stage")
    model, optimizer = build(args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args))

    # Since the beginning, over resumes: of every step loss, gradient norm and learning rate; (step, validation loss).
    history: dict[str, list[Any]] = {"losses": [], "norms": [], "rates": [], "validation": []}
    position = 0  # how many blocks of text were used
    if args.resume or args.resume_step is not None:
        tag = None if args.resume_step is None else f"step_{args.resume_step}"
        content = smp.resume_from_checkpoint(args.out, tag)  # whatever the degrees, or the precision, were
        history, position = content["history"], content["position"]
        scheduler.load_state_dict(content["scheduler"])
    first, last = len(history["losses"]), min(args.steps, args.stop_at or args.steps)
    if smp.rank() == 0:
        print(
            f"{len(train_files)} files, {len(text.bytes):,} bytes to train on; {len(validation_files)} files, "
            f"{len(validation.bytes):,} bytes for validation; {smp.size()} processes = {smp.rdp_size()} replicas x "
            f"{smp.pp_size()} stages x {smp.tp_size()} tensor parts" + (f"; resuming at step {first}" if first else ""),
            flush=True,
        )

    entropy = validation.unigram_entropy()
    start = time.monotonic()
    for step, bar in progress(first, last):
        optimizer.zero_grad()
        loss = train_step(model, *own_part(text.batch(position, args.batch))).reduce_mean()
        history["norms"].append(optimizer.clip_master_grads(args.clip))
        history["rates"].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        position += args.batch
        history["losses"].append(mean_over_replicas(loss))
        speed = (step + 1 - first) * args.batch * args.context / (time.monotonic() - start)
        state = state_of_training(optimizer, history["norms"][-1], args)
        bar.set_postfix_str(f"loss {history['losses'][-1]:.3f}, {state}, {speed:,.0f} tokens/s", refresh=False)
        if (step + 1) % args.validate_every == 0 or step + 1 == args.steps:
            found = validate(model, validation, args)
            history["validation"].append((step + 1, found))
            if smp.rank() == 0:
                below = (1 - found / entropy) * 100
                bar.write(
                    f"step {step + 1}: validation loss {found:.3f} nats per byte, {below:.0f} % below the unigram "
                    f"entropy of {entropy:.3f}"
                )
        if (step + 1) % args.save_every == 0 or step + 1 == last:
            smp.save_checkpoint(
                *(args.out, f"step_{step + 1}"),
                model=model,
                optimizer=optimizer,
                user_content={"history": history, "position": position, "scheduler": scheduler.state_dict()},
                num_kept_partial_checkpoints=args.keep,
            )
    if smp.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {**history, "position": position, "unigram_entropy": entropy}
        (args.report or args.out / "report.json").write_text(json.dumps(report))
    if args.sample:
        written = sample(model, "def ", args.sample, args)
        if smp.rank() == 0:
            print(f"A sample:\n{written}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tensor", type=int, default=1, metavar="N", help="tensor parallel degree")
    add("--pipeline", type=int, default=1, metavar="N", help="pipeline parallel degree")
    add("--microbatches", type=int, default=4, metavar="N", help="parts into which each batch is cut")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--context", type=int, default=128, help="bytes the model sees")
    add("--batch", type=int, default=16, help="blocks of text per step, over all replicas")
    add("--steps", type=int, default=240)
    add("--stop-at", type=int, metavar="STEP", help="end the run early, with the learning rates of a full one")
    add("--lr", type=float, default=4e-3)
    add("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of the gradient of the whole model")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="compute in float16, with a dynamic loss scale")
    precision.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    add("--shard-optimizer-state", action="store_true", help="each replica keeps a part of the optimizer's state")
    add("--seed", type=int, default=1)
    add("--data", type=Path, metavar="PATH", help="a folder of text files (default: Python's standard library)")
    add("--out", type=Path, default=Path("runs/gpt"), metavar="PATH", help="where checkpoints and losses go")
    add("--report", type=Path, metavar="PATH", help="where losses and rates go (default: report.json under --out)")
    add("--save-every", type=int, default=60, metavar="STEPS")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints to keep")
    add("--validate-every", type=int, default=120, metavar="STEPS")
    add("--validation-batches", type=int, default=8, metavar="N")
    add("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    add("--resume-step", type=int, metavar="STEP", help="go on from this checkpoint instead")
    add("--sample", type=int, default=0, metavar="BYTES", help="length of the text written at the end")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    smp.init(
        {
            "pipeline_parallel_degree": args.pipeline,
            "tensor_parallel_degree": args.tensor,
            "microbatches": args.microbatches,
            "ddp": True,
            "fp16": args.fp16,
            "bf16": args.bf16,
            "shard_optimizer_state": args.shard_optimizer_state,
        }
    )
    train(args)


if __name__ == "__main__":
    main()
