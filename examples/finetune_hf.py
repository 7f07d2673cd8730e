"""Fine-tunes a GPT-2 or a Llama of transformers, split over processes, and saves it for plain transformers.

    python examples/finetune_hf.py                                                             # one process
    mpirun -np 4 python examples/finetune_hf.py --tensor 2 --pipeline 2                        # four: 2 x 2
    mpirun -np 4 python examples/finetune_hf.py --tensor 2 --pipeline 2 --model gpt2 --start DIR   # goes on from DIR

The model is the library's own, made from a configuration or read from a directory; what `smp` adds is marked by the
name. What is saved is a directory that `from_pretrained` loads: whole weights under the names of transformers. The text
is Python's standard library as found on this machine, or what `--data` names, one token per byte.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_gpt import Text, find_text
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import smp


def configuration(args: argparse.Namespace) -> Any:
    """A small model of the family that was asked for."""
    if args.model == "gpt2":
        return GPT2Config(
            vocab_size=args.vocabulary,
            n_positions=args.context,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=args.tied,
        )
    return LlamaConfig(
        vocab_size=args.vocabulary,
        max_position_embeddings=args.context,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=args.tied,
    )


@smp.step
def train_step(model: Any, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@smp.step(microbatches=1)
def logits_step(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """[rows, length] -> [rows, length, vocabulary], in evaluation, on every rank of a pipeline."""
    model.eval()
    with torch.no_grad():
        logits = logits_step(model, ids).concat()
    model.train()
    return logits


def save(model: Any, config: Any, folder: Path) -> None:
    """Writes a directory that `from_pretrained` of plain transformers loads. Every rank calls it; rank 0 writes."""
    weights = model.state_dict(gather_to_rank0=True)
    if smp.rank() == 0:
        for to_transformers, _ in smp.state.module_manager.translate_functions:
            weights = to_transformers(weights)
        with torch.device("meta"):  # it only says what the files have to look like
            plain = AutoModelForCausalLM.from_config(config)
        plain.save_pretrained(folder, state_dict=weights)
    smp.barrier()


def check(model: Any, folder: Path, ids: Tensor) -> float:
    """The largest difference between the logits of this model and of the saved one, on this rank's rows."""
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
    return float((logits_of(model, ids).cpu() - expected).abs().max())


def train(args: argparse.Namespace) -> tuple[Any, list[float]]:
    """Trains, saves and checks; returns the model and the loss of every step."""
    if args.batch % smp.dp_size():
        raise SystemExit(f"--batch {args.batch} cannot be divided among the {smp.dp_size()} ranks of each stage")
    text = Text(find_text(args.data)[0], args.context, args.seed)
    torch.manual_seed(args.seed)
    with smp.tensor_parallelism(enabled=args.tensor > 1):
        if args.start is None:
            module = AutoModelForCausalLM.from_config(configuration(args))
        else:
            module = AutoModelForCausalLM.from_pretrained(args.start)
    config = module.config
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))

    losses: list[float] = []
    for step in range(args.steps):
        blocks = text.batch(step * args.batch, args.batch)[0] % config.vocab_size
        ids = blocks.chunk(smp.dp_size())[smp.dp_rank()]
        optimizer.zero_grad()
        loss = train_step(model, ids).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        each = smp.allgather(float(loss), smp.DP_GROUP)
        losses.append(sum(each) / len(each))
        if smp.rank() == 0 and (step % 10 == 0 or step + 1 == args.steps):
            print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)

    save(model, config, args.out)
    difference = check(model, args.out, ids)
    if smp.rank() == 0:
        print(f"saved {args.out}; from_pretrained gives the same logits to within {difference:.1e}", flush=True)
    return model, losses


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=["llama", "gpt2"], default="llama")
    add("--start", type=Path, metavar="DIR", help="a saved model to go on from (default: a new one)")
    add("--tensor", type=int, default=1, metavar="N", help="tensor parallel degree")
    add("--pipeline", type=int, default=1, metavar="N", help="pipeline parallel degree")
    add("--microbatches", type=int, default=2, metavar="N", help="parts into which each batch is cut")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--vocabulary", type=int, default=256, metavar="N", help="bytes are taken modulo N")
    add("--tied", action="store_true", help="one weight for the embedding and the head")
    add("--context", type=int, default=64, help="bytes the model sees")
    add("--batch", type=int, default=16, help="blocks of text per step, over all replicas")
    add("--steps", type=int, default=40)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=1)
    add("--data", type=Path, metavar="PATH", help="a folder of text files (default: Python's standard library)")
    add("--out", type=Path, default=Path("runs/finetuned"), metavar="PATH", help="where the model is saved")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    smp.init(
        {
            "tensor_parallel_degree": args.tensor,
            "pipeline_parallel_degree": args.pipeline,
            "microbatches": args.microbatches,
            "ddp": True,
        }
    )
    train(args)


if __name__ == "__main__":
    main()
