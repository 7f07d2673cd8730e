"""Values of glue code: tensors that live on one stage while every rank runs the same program.

`Value` is what the engine moves and differentiates; `Placed` is the tensor object that user code holds. An in-place
operation gives its `Placed` a new `Value`, as autograd gives a tensor a new history.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from smp import rng
from smp.errors import StepError

if TYPE_CHECKING:
    from smp.pp.program import Program
    from smp.pp.tape import Run


class _Current(threading.local):
    """What the calling thread is running: the program of a microbatch, and the random streams of a step."""

    program: "Program | None" = None
    in_backward: bool = False  # the backward of a model without a pipeline runs; under a function mode it calls itself

    @property
    def streams(self) -> rng.Streams | None:
        return rng.current_streams()

    @streams.setter
    def streams(self, streams: rng.Streams | None) -> None:
        rng.set_current_streams(streams)


current = _Current()


class Storage:
    """Counts in-place writes to memory that several values share (views and their base)."""

    __slots__ = ("version", "writer", "of_buffer")

    def __init__(self, of_buffer: bool = False) -> None:
        self.version = 0
        self.writer = ""
        self.of_buffer = of_buffer  # the memory of a buffer of the model, which calls write to


class Value:
    """One tensor that lives on the stage `owner`.

    `local` is, on the owner, a detached leaf with the data (or the Parameter itself), elsewhere None. Everything else
    is the same on every rank of the pipeline group. `order` counts up in program order.
    """

    __slots__ = (
        "owner", "program", "shape", "stride", "dtype", "requires_grad", "local", "copies", "order", "storage",
        "version",
        "hooks", "parameter", "spent", "grad", "graph", "run", "holder", "is_leaf",
    )  # fmt: skip

    def __init__(
        self,
        owner: int,
        program: "Program",
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool,
        local: torch.Tensor | None,
        storage: Storage | None = None,
    ) -> None:
        self.owner = owner
        self.program = program
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.local = local
        self.copies: dict[int, Value] = {}
        self.order = program.next_order()
        self.storage = storage or Storage()
        self.version = self.storage.version
        self.hooks: list[Callable[[torch.Tensor], torch.Tensor | None]] = []
        self.parameter: torch.Tensor | None = None  # the parameter or written buffer that this value is
        self.grad: torch.Tensor | None = None  # what came back from other stages and later calls, where no leaf has it
        self.graph: torch.Tensor | None = None  # on the owner, the data with its autograd graph, and the calls it is of
        self.run: Run | None = None
        self.spent = False  # a backward has gone through the node that made it
        self.holder: weakref.ref[Placed] | None = None  # what user code has of it
        self.is_leaf = False  # an autograd graph begins at `local`

    @property
    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def is_wanted(self) -> bool:
        """Whether somebody may ask for the data: user code that holds it, or an autograd graph."""
        if self.is_leaf or self.holder is None or self.parameter is not None:
            return True
        holder = self.holder()
        return holder is not None and holder.value is self

    def check_fresh(self) -> None:
        if self.version != self.storage.version:
            raise StepError(
                f"a tensor is used at {user_line()} after {self.storage.writer} changed its memory in place through "
                "another view. Across pipeline stages only the tensor written to sees the change: write to the whole "
                "tensor, or use an out-of-place operation."
            )


class Placed(torch.Tensor):
    """The tensor object that glue code sees for a `Value`. It has shape, dtype and device, and no data of its own."""

    value: Value

    @staticmethod
    def __new__(cls, value: Value) -> "Placed":
        self = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride, dtype=value.dtype, device=value.program.device
        )
        self.hold(value)
        return self

    def hold(self, value: Value) -> None:
        """Stand for another value from now on."""
        self.value = value
        value.holder = weakref.ref(self)

    def __init__(self, value: Value) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reached where no GlueMode is active: inside a node that got hold of a placed value, or after the step.
        kwargs = kwargs or {}
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        program = current.program
        name = getattr(func, "__name__", str(func))
        if program is None:
            raise StepError(
                f"'{name}' was called at {user_line()} on a tensor of a step that is over. Return the tensor from the "
                "step function; what it returns is available on every rank."
            )
        if not program.in_node:
            return program.glue_function(func, args, kwargs)
        raise StepError(
            f"'{name}' at {user_line()}, inside {program.in_node}, uses a tensor that it was not given as an argument "
            "(a closure or an attribute holds it). Pass it as an argument, so that it can be moved to that stage."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise StepError(
            f"{func} at {user_line()} works below torch's function level (torch.vmap, torch.func, a C extension) on a "
            "tensor that lives on one pipeline stage. Put that code inside one module, so that it runs on one stage."
        )


class GlueMode(TorchFunctionMode):
    """Routes every torch call of glue code to the microbatch's program."""

    def __init__(self, program: "Program") -> None:
        super().__init__()
        self.program = program

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.program.in_node:
            return func(*args, **(kwargs or {}))
        return self.program.glue_function(func, args, kwargs or {})


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


# Questions that shape, dtype and device answer, the same on every rank.
_PLAIN: frozenset[Any] = frozenset(
    [
        *(
            _getter(name)
            for name in (
                "shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cuda", "is_cpu", "is_sparse",
                "is_quantized",
                "is_nested", "itemsize", "nbytes", "is_mps", "is_xpu", "is_mkldnn",
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "is_contiguous",
                "__len__", "get_device", "element_size", "stride", "is_signed", "__hash__", "__reduce_ex__",
                "__deepcopy__",
                "is_inference",
            )
        ),
        *(_getter(name) for name in ("grad_dtype",) if hasattr(torch.Tensor, name)),  # torch 2.10 and newer
        torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.is_storage,
        torch.result_type, torch.can_cast, torch.is_inference,
    ]
)  # fmt: skip
GET_REQUIRES_GRAD = _getter("requires_grad")
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
GET_IS_LEAF = _getter("is_leaf")
GET_GRAD_FN = _getter("grad_fn")
GET_DATA = _getter("data")
GET_GRAD = _getter("grad")


def is_plain_query(func: Any) -> bool:
    return func in _PLAIN


def user_line() -> str:
    """`file:line` of the innermost frame that is neither smp's nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("smp", "torch", "contextlib", "threading"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"
