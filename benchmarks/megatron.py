"""A side that runs Megatron-Core's transformer layers, in an environment of its own that has `megatron-core` and torch:

    python -m venv /tmp/megatron; /tmp/megatron/bin/pip install torch numpy megatron-core
    SMP_BENCH_MEGATRON=/tmp/megatron/bin/python make bench ROW=megatron

Its layers are made for CUDA. On the CPU they run with its plain attention and norms (no fused kernels, and so no
sequence parallelism, which needs those norms), and two functions that only speak to CUDA are replaced below: the figure
says what one gets on this machine, not how fast Megatron is on its own ground.
"""

import contextlib
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import models

WARM_UP = 3  # steps, run at building
RATE = 0.05
# Where a layer of Megatron's has what a block of models.py has.
NAMES = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "out",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "up",
    "mlp.linear_fc2": "down",
}
CUT_ALONG = {"self_attention.linear_qkv": 0, "mlp.linear_fc1": 0, "self_attention.linear_proj": 1, "mlp.linear_fc2": 1}


def _transformer(sizes: dict[str, int]) -> nn.Module:
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asked for whatever the device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from megatron.core import parallel_state  # type: ignore[import-not-found]
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-not-found]
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # type: ignore[import-not-found]
    from megatron.core.transformer.transformer_block import TransformerBlock  # type: ignore[import-not-found]
    from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()  # there is no dropout here
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=sizes["degree"])
    config = TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["width"],
        num_attention_heads=sizes["width"] // 64,
        ffn_hidden_size=4 * sizes["width"],
        tensor_model_parallel_size=sizes["degree"],
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    block: nn.Module = TransformerBlock(config, get_gpt_layer_local_spec(), post_layer_norm=False)
    return block


@torch.no_grad()
def _take_weights(transformer: Any, blocks: Any) -> None:
    """This rank's part of the blocks' weights; Megatron orders the rows of query, key and value by head."""
    for layer, block in zip(transformer.layers, blocks, strict=True):
        for name, parameter in layer.named_parameters():
            path, _, leaf = name.rpartition(".")
            whole = block.get_parameter(f"{NAMES[path]}.{leaf}")
            if NAMES[path] == "qkv":
                whole = whole.unflatten(0, (3, block.heads, -1)).transpose(0, 1).reshape(whole.shape)
            dim = CUT_ALONG.get(path)
            if dim is not None and (dim == 0 or leaf == "weight"):
                whole = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
            parameter.copy_(whole)


def tensor_parallel(sizes: dict[str, int], batch: int) -> tuple[Any, list[float]]:
    """Blocks of attention and perceptron, which share one batch; Megatron has the sequence first."""
    dist.init_process_group("gloo")
    model = _transformer(sizes)
    _take_weights(model, models.blocks(sizes))
    length = sizes["length"]
    unseen = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches: list[tuple[Tensor, ...]] = []
    for number in range(4):
        batches.append(tuple(t.transpose(0, 1).contiguous() for t in models.states(sizes, batch, number)))
    number = 0

    def step() -> float:
        nonlocal number
        x, target = batches[number % len(batches)]
        optimizer.zero_grad()
        loss = (model(x, unseen) - target).square().mean()
        loss.backward()
        optimizer.step()
        number += 1
        return float(loss)

    return step, [step() for _ in range(WARM_UP)]
