"""Distributed transformer layers, and sequences of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from smp.errors import PartitionError, UsageError
from smp.tp.attention import Beside, Block, DistributedAttentionLayer, Matrix, add
from smp.tp.module import DistributedModule
from smp.tp.options import Options
from smp.tp.region import Region, Spread, States, open_region

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
}


class DistributedTransformerOutputLayer(Block):
    """The MLP of a layer with residual and norms: [N, S, H] -> [N, S, H].

        x + dropout(dense2(activation(dense1(x))))       dense1 cut along outputs, dense2 along inputs

    Args:
        hidden_size: H.
        intermediate_size: a multiple of the tensor-parallel degree.
        activation: gelu, gelu_new (its tanh approximation), relu, silu or quick_gelu.
        hidden_dropout_prob, layernorm_epsilon, initializer_range, use_normal_initialization, pre_layernorm,
            post_layernorm, options: as for DistributedAttentionLayer.
        fp32_residual_addition: the residual is added in float32.

    Raises:
        PartitionError: intermediate_size does not divide by the tensor-parallel degree.
        UsageError: options that do not fit together.
    """

    dense1: Matrix
    dense2: Matrix

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        **options: Any,
    ) -> None:
        if intermediate_size % self.tp_group.size:
            raise PartitionError(
                f"intermediate_size {intermediate_size}: not a multiple of tensor_parallel_degree {self.tp_group.size}"
            )
        o = Options.of({**options, "fp32_residual_addition": fp32_residual_addition}, type(self).__name__)
        std = initializer_range if use_normal_initialization else None
        super().__init__(hidden_size, hidden_dropout_prob, layernorm_epsilon, std, pre_layernorm, post_layernorm, o)
        if activation not in ACTIVATIONS:
            raise UsageError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        self.intermediate_size, self.activation = intermediate_size, activation
        sections = (intermediate_size,) * (2 if o.gated_mlp else 1)
        self.make_linear("dense1", sum(sections), hidden_size, o.use_mlp_bias, dim=0, sections=sections)
        self.make_linear("dense2", hidden_size, intermediate_size, o.use_mlp_bias, dim=1)

    def forward(self, inputs: Any, normed: Spread | None = None, *, parallel: bool = False) -> Any:
        """[N, S, H] -> [N, S, H].

        Args:
            inputs: hidden states. Inside of a layer: `States`.
            normed: inside of a layer: the normalised input, where attention has it already.
            parallel: inside of a layer whose attention reads the same input.
        """
        if isinstance(inputs, States):
            return self.beside(inputs, normed) if parallel else self.inside(inputs)
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        region, states = open_region(self, (hidden, None), cross=False, num_heads=1)
        return region.leave(self.inside(states))

    @property
    def second(self) -> Matrix:
        return self.dense2

    def partial(self, region: Region, x: Tensor | Spread, states: States) -> Tensor:
        act = ACTIVATIONS[self.activation]
        up = region.column(x, self.dense1.weight, self.dense1.bias)
        if self.options.gated_mlp:
            gate, up = up.chunk(2, -1)
            return F.linear(act(gate) * up, self.dense2.weight)
        return F.linear(act(up), self.dense2.weight)

    def extra_repr(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        return f"{sizes}, activation={self.activation}"


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer: `attention`, `cross_attention` if any, `output`.

    Args:
        num_attention_heads, attention_head_size, hidden_size, attention_dropout_prob, hidden_dropout_prob,
            layernorm_epsilon, initializer_range, use_normal_initialization, causal_mask_size, pre_layernorm,
            post_layernorm: as for DistributedAttentionLayer.
        intermediate_size, activation: as for DistributedTransformerOutputLayer.
        add_cross_attention: whether there is attention on an encoder's states, between the two others.
        options: see `Options`.

    Raises:
        PartitionError: a size does not divide by the tensor-parallel degree.
        UsageError: options that do not fit together.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        o = Options.of(options, type(self).__name__)
        self.options = o
        self.num_attention_heads, self.add_cross_attention = num_attention_heads, add_cross_attention
        both: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
        }
        if o.parallel_attention and (add_cross_attention or not pre_layernorm or post_layernorm):
            raise UsageError(
                "parallel_attention needs pre_layernorm True, post_layernorm False and no cross attention: both halves "
                "read the layer's input"
            )
        self.attention = DistributedAttentionLayer(**both, **heads, causal_mask_size=causal_mask_size, **options)
        if add_cross_attention:
            own = {**options, "attention_window": None}
            self.cross_attention = DistributedAttentionLayer(**both, **heads, cross_attention=True, **own)
        if o.single_pre_layernorm:
            both["pre_layernorm"] = False
        self.output = DistributedTransformerOutputLayer(
            **both, intermediate_size=intermediate_size, activation=activation, **options
        )

    def forward(self, inputs: Any, position_ids: Tensor | None = None) -> Any:
        """(hidden [N, S, H], attention_mask) -> the same tuple with new hidden states; with cross attention (hidden,
        cross_states [N, Sk, H], attention_mask, cross_mask). Inside of a transformer: `States` -> `States`.

        Args:
            inputs: masks are additive or bool (True: seen), [N, 1, 1, S] or [N, 1, S, S], or None.
            position_ids: [N or 1, S], for rotary angles; None: 0, 1, 2, ..
        """
        if isinstance(inputs, States):
            return self.inside(inputs)
        region, states = open_region(
            self,
            inputs,
            cross=self.add_cross_attention,
            num_heads=self.num_attention_heads,
            position_ids=position_ids,
        )
        return region.leave(self.inside(states).hidden), *inputs[1:]

    def inside(self, states: States) -> States:
        """The layer inside of a region."""
        if self.options.parallel_attention:
            return states._replace(hidden=self._parallel(states))
        states = states._replace(hidden=self.attention(states))
        if self.add_cross_attention:
            states = states._replace(hidden=self.cross_attention(states))
        return states._replace(hidden=self.output(states))

    def _parallel(self, states: States) -> Tensor:
        """Both halves on the same input; their parts are added up before the ranks' are, in one message."""
        region = Region.inside(self, states.dim)
        attention: Beside = self.attention(states, parallel=True)
        shared = attention.normed if self.options.single_pre_layernorm else None
        output: Beside = self.output(states, shared, parallel=True)
        changes = [half.out for half in (attention, output) if half.is_total]
        parts = [half for half in (attention, output) if not half.is_total]
        if parts:
            biases = [half.bias for half in parts if half.bias is not None]
            changes.append(region.total(_sum([half.out for half in parts]), _sum(biases) if biases else None))
        return add(states.hidden, _sum(changes), self.options)


def _sum(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]


class DistributedTransformer(DistributedModule):
    """A sequence of transformer layers, `seq_layers`.

    Args:
        num_layers: how many.
        options: see `Options`; `attention_window` may be a sequence, one for each layer.
        others: as for DistributedTransformerLayer.

    Raises:
        PartitionError: a size does not divide by the tensor-parallel degree.
        UsageError: options that do not fit together.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_attention_heads, self.add_cross_attention = num_attention_heads, add_cross_attention
        windows = options.pop("attention_window", None)
        if not isinstance(windows, Sequence):
            windows = [windows] * num_layers
        if len(windows) != num_layers:
            raise UsageError(f"attention_window has {len(windows)} values for num_layers {num_layers}")
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    num_attention_heads,
                    attention_head_size,
                    hidden_size,
                    intermediate_size,
                    attention_dropout_prob,
                    hidden_dropout_prob,
                    activation,
                    layernorm_epsilon,
                    initializer_range,
                    use_normal_initialization,
                    causal_mask_size,
                    add_cross_attention,
                    pre_layernorm,
                    post_layernorm,
                    **{**options, "layer_idx": index, "attention_window": windows[index]},
                )
                for index in range(num_layers)
            )
        )

    def forward(self, inputs: Any, position_ids: Tensor | None = None) -> Any:
        """As that of a layer. Inside of a distributed head: `States` -> `States`."""
        if isinstance(inputs, States):
            return self.seq_layers(inputs)
        region, states = open_region(
            self,
            inputs,
            cross=self.add_cross_attention,
            num_heads=self.num_attention_heads,
            position_ids=position_ids,
        )
        return region.leave(self.seq_layers(states).hidden), *inputs[1:]
