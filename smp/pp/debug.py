"""SMP_DEBUG=1: the stages of a pipeline compare what they are about to do, call by call."""

import os
from typing import TYPE_CHECKING, Any

from smp.errors import StepError
from smp.pp.placed import user_line

if TYPE_CHECKING:
    from smp.pp.program import Program
    from smp.runtime import Runtime

from smp.topology import CommGroup


class Comparison:
    """Every rank of a pipeline runs the same program; one that does not is told so here instead of hanging later."""

    def __init__(self, runtime: "Runtime") -> None:
        self._group = runtime.group(CommGroup.PP_GROUP)
        self._transport = runtime.transport
        self._count = 0

    def compare(self, program: "Program", name: str, signature: Any) -> None:
        """Exchange this rank's next call with the other stages. Raises `StepError` on all of them when they differ."""
        self._count += 1
        arguments = repr(signature[2]) if signature else ""
        mine = (program.index, name, arguments, user_line())
        calls = self._transport.all_gather_object(mine, self._group, "smp.step (SMP_DEBUG comparison)")
        if all(call[:3] == calls[0][:3] for call in calls):
            return
        lines = [
            f"  pp_rank {rank}: microbatch {index}, {called} at {line}"
            + (f" with {args}" if called == calls[0][1] and index == calls[0][0] else "")
            for rank, (index, called, args, line) in enumerate(calls)
        ]
        raise StepError(
            f"the ranks of a pipeline run different programs; call {self._count} differs:\n"
            + "\n".join(lines)
            + "\nA step function must do the same on every rank. Take code that depends on the rank out of it."
        )


def debug_enabled() -> bool:
    """Whether SMP_DEBUG asks for the comparison."""
    return os.environ.get("SMP_DEBUG", "0") not in ("", "0")
