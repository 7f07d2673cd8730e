"""fp32 masters of half precision parameters: what an optimizer updates, so that small updates are not rounded away.

    model      W  fp16/bf16     --- forward, backward --->  W.grad
                  ^ rounded                                    | copied; the same tensor where it is fp32 already
    optimizer  M  fp32          <-------- update ---------  M.grad

The masters of one parameter group lie in one flat tensor. A master has the marks of its parameter (how it is cut, who
counts it), so that norms and checkpoints treat it alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from smp.dp.optimizer_state import MASTER_KEY
from smp.fp16.gradients import HALF

_ALIGNMENT = 16  # elements between starts of masters in their flat tensor: vector instructions want aligned memory


class Masters:
    """The masters of one optimizer's half precision parameters; none before `install`."""

    def __init__(self) -> None:
        self.halves: list[Parameter] = []
        self.masters: list[Parameter] = []
        self._versions: list[int] = []  # of the half parameters, as last written by us
        self._place: dict[int, int] = {}  # of a master, by its id, in these lists
        self._place_of_half: dict[int, int] = {}

    def half_of(self, param: Tensor) -> Tensor:
        """The model's parameter that `param` is the master of; any other parameter itself."""
        return self.halves[self._place[id(param)]] if id(param) in self._place else param

    def has_master(self, half: Tensor) -> bool:
        """Whether the model's parameter `half` has one of these masters."""
        return id(half) in self._place_of_half

    def master_of(self, half: Tensor) -> Parameter | None:
        """The master of the model's parameter `half`; None when it has none."""
        return self.masters[self._place_of_half[id(half)]] if self.has_master(half) else None

    def pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        """Each parameter with its master."""
        return zip(self.halves, self.masters)

    def is_master(self, param: Tensor) -> bool:
        """Whether `param` is one of these masters."""
        return id(param) in self._place

    @torch.no_grad()
    def install(self, optimizer: Optimizer) -> None:
        """Puts new masters in the place of all half precision parameters in the optimizer's groups; state that these
        have goes to them, in fp32."""
        for group in optimizer.param_groups:
            params = group["params"]
            places = [place for place, param in enumerate(params) if param.dtype in HALF]
            for place, master in zip(places, _flat_masters([params[place] for place in places])):
                half = params[place]
                self._place[id(master)] = self._place_of_half[id(half)] = len(self.masters)
                self.halves.append(half)
                self.masters.append(master)
                self._versions.append(half._version)
                if half in optimizer.state:
                    optimizer.state[master] = {
                        key: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
                        for key, value in optimizer.state.pop(half).items()
                    }
                params[place] = master

    def follow(self) -> None:
        """Masters of parameters that somebody else has written since `write` take their values. Where a value is the
        rounded master it is kept, so that swapping weights out and in again loses nothing."""
        for place, half in enumerate(self.halves):
            if half._version != self._versions[place]:
                self._follow(place)

    @torch.no_grad()
    def _follow(self, place: int) -> None:
        half, master = self.halves[place], self.masters[place]
        self._versions[place] = half._version
        master.copy_(torch.where(master.to(half.dtype) == half, master, half.float()))

    def take(self, half: Tensor, value: Tensor) -> None:
        """`value` has just been written to the model's parameter `half`; its master takes it before it is rounded."""
        place = self._place_of_half[id(half)]
        if value.dtype in HALF:
            self._follow(place)
        else:
            self.set(self.masters[place], value)

    @torch.no_grad()
    def reload(self) -> None:
        """All masters take the parameters' values, whatever they hold."""
        for half, master in self.pairs():
            master.copy_(half)
        self.note_versions()

    @torch.no_grad()
    def write(self) -> None:
        """The parameters become the rounded masters."""
        if self.masters:
            torch._foreach_copy_([*self.halves], [*self.masters])
        self.note_versions()

    @torch.no_grad()
    def set(self, master: Tensor, value: Tensor) -> None:
        """Gives one master a value, and its parameter the rounded one."""
        place = self._place[id(master)]
        half = self.halves[place]
        master.copy_(value)
        half.copy_(master)
        self._versions[place] = half._version

    def note_versions(self) -> None:
        """What the parameters hold now is known to be the rounded masters."""
        self._versions = [half._version for half in self.halves]

    @torch.no_grad()
    def take_gradients(self) -> bool:
        """Masters' gradients become those of their parameters: the same tensor when it is fp32, else a copy of it.
        Returns whether any is a copy."""
        copies, sources = [], []
        for half, master in self.pairs():
            grad = half.grad
            if grad is None or grad.dtype == torch.float32:
                master.grad = grad
            elif grad.layout is not torch.strided:
                master.grad = grad.coalesce().float() if grad.layout is torch.sparse_coo else grad.float()
            else:
                if master.grad is None or master.grad.layout is not torch.strided:
                    master.grad = torch.empty_like(master)
                copies.append(master.grad)
                sources.append(grad)
        if copies:
            torch._foreach_copy_(copies, sources)
        return any(master.grad is not half.grad for half, master in self.pairs())

    def release_shared_gradients(self) -> None:
        """Masters let go of gradients that are their parameters' own, so that the model can free them."""
        for half, master in self.pairs():
            if master.grad is half.grad:
                master.grad = None

    # ---- as state of the optimizer, so that what gathers, cuts and moves state serves masters as well

    @contextmanager
    def as_state(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, each master is an entry of its own state."""
        self.follow()
        for master in self.masters:
            optimizer.state[master][MASTER_KEY] = master.detach()
        try:
            yield
        finally:
            for master in self.masters:
                optimizer.state[master].pop(MASTER_KEY, None)
                if not optimizer.state[master]:
                    del optimizer.state[master]


def _flat_masters(halves: Sequence[Parameter]) -> list[Parameter]:
    """A master for each parameter, all in one tensor for each device."""
    masters: dict[int, Parameter] = {}
    for device in dict.fromkeys(half.device for half in halves):
        members = [half for half in halves if half.device == device]
        room = [-(-half.numel() // _ALIGNMENT) * _ALIGNMENT for half in members]
        flat = torch.zeros(sum(room), dtype=torch.float32, device=device)
        for half, part in zip(members, flat.split(room)):
            master = Parameter(part[: half.numel()].view(half.shape).copy_(half), requires_grad=half.requires_grad)
            master.__dict__.update({key: value for key, value in half.__dict__.items() if key.startswith("_smp_")})
            masters[id(half)] = master
    return [masters[id(half)] for half in halves]
