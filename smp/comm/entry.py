"""Entry check of collective calls: a call that some ranks of its group never make ends with an error that names them.

`state_dict()` under `if smp.rank() == 0:` would wait for ever for the other ranks of the model replica. So every rank
that enters such a call first announces itself in the store, and goes on only when the whole group has arrived:

    rank a                          store                          rank b
    (1) name of the call     ->  {base}/{rank}
    (2) count + 1            ->  {base}/count
        last one to arrive:  ->  {base}/verdict  "go" | "differ"   <- (3) everybody else polls
        deadline passed:     ->  {base}/verdict  "late"            <- (3)

The verdict is written by compare-and-set, so all ranks read the same one. A rank that was missed counts the entry that
the others gave up as its own, so that the next call finds all of them at the same number again.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from smp.errors import CheckpointError, CommError
from smp.topology import CommGroup

if TYPE_CHECKING:
    from smp.groups import Group
    from smp.runtime import Runtime

_DEFAULT_TIMEOUT = 15.0

Result = TypeVar("Result")


class Store(Protocol):
    """The part of `torch.distributed.Store` that the check uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Watch(Protocol):
    """The part of `smp.failures.Monitor` that the check uses."""

    def wait(self, test: Callable[[], bool], call: str, ranks: Sequence[int]) -> None: ...
    def states(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]: ...


def guard_timeout() -> float:
    """Seconds that a rank waits for the others of its group to make the same call: `SMP_GUARD_TIMEOUT`, default 15."""
    return float(os.environ.get("SMP_GUARD_TIMEOUT", _DEFAULT_TIMEOUT))


class EntryCheck:
    """Makes the collective entries of one process, `rank` of the world.

    `entries` counts them per group of ranks; it must live as long as the store.
    """

    def __init__(
        self, store: Store, rank: int, monitor: Watch, entries: Counter[tuple[int, ...]] | None = None
    ) -> None:
        self._store, self._rank, self._monitor = store, rank, monitor
        self._entries = Counter() if entries is None else entries

    def enter(self, call: str, ranks: Sequence[int], advice: str, timeout: float | None = None) -> None:
        """Return when every rank of `ranks` (world ranks, this one included) has entered `call`.

        Raises `CommError` on every rank that entered when some did not within `timeout` seconds (they are named, then
        `advice`), or when ranks of the group entered different calls.
        """
        if len(ranks) == 1:
            return
        ranks = tuple(ranks)
        before, base = self._next(ranks)
        while self._store.check([f"{base}/verdict"]):  # the others waited for this rank and gave up
            before, base = self._next(ranks)
        self._store.set(f"{base}/{self._rank}", call)  # (1)
        if self._store.add(f"{base}/count", 1) == len(ranks):  # (2)
            self._forget(before, ranks)
            verdict = self._settle(base, "go" if len(set(self._announced(base, ranks).values())) == 1 else "differ")
        else:
            verdict = self._await_verdict(base, call, ranks, guard_timeout() if timeout is None else timeout)
        if verdict != "go":
            raise CommError(self._explain(verdict, call, base, ranks, advice))

    def _next(self, ranks: tuple[int, ...]) -> tuple[str, str]:
        """Counts an entry; the prefixes of the keys of the one before and of this one."""
        number, group = self._entries[ranks], "-".join(map(str, ranks))
        self._entries[ranks] += 1
        return f"smp/entry/{group}/{number}", f"smp/entry/{group}/{number + 1}"

    def _settle(self, base: str, verdict: str) -> str:
        return self._store.compare_set(f"{base}/verdict", "", verdict).decode()

    def _await_verdict(self, base: str, call: str, ranks: Sequence[int], timeout: float) -> str:  # (3)
        deadline, key = time.monotonic() + timeout, f"{base}/verdict"
        self._monitor.wait(lambda: self._store.check([key]) or time.monotonic() > deadline, call, ranks)
        return self._settle(base, "late")

    def _announced(self, base: str, ranks: Sequence[int]) -> dict[int, str]:
        return {r: self._store.get(f"{base}/{r}").decode() for r in ranks if self._store.check([f"{base}/{r}"])}

    def _forget(self, base: str, ranks: Sequence[int]) -> None:
        """Delete the keys of an entry that every rank has left, so that a long job does not fill the store."""
        for key in ("count", "verdict", *map(str, ranks)):
            self._store.delete_key(f"{base}/{key}")

    def _explain(self, verdict: str, call: str, base: str, ranks: Sequence[int], advice: str) -> str:
        announced = self._announced(base, ranks)
        missing = [r for r in ranks if r not in announced]
        if verdict == "differ":
            calls = ", ".join(f"rank {r}: {name}" for r, name in sorted(announced.items()))
            return f"The ranks {list(ranks)} entered different collective calls at the same time: {calls}. {advice}"
        if not missing:
            return (
                f"{call} is collective over the ranks {list(ranks)}, which did not arrive together: some gave up "
                f"before the last one came. {advice} If the ranks are only slow, raise SMP_GUARD_TIMEOUT (seconds)."
            )
        return (
            f"{call} is collective over the ranks {list(ranks)}: entered by ranks {sorted(announced)}, missing ranks "
            f"{missing}{self._whereabouts(missing)}. {advice} If the missing ranks are only slow, raise "
            f"SMP_GUARD_TIMEOUT (seconds, now {guard_timeout():g})."
        )

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        """` (rank 1 in smp.barrier() at train.py:12)`, as far as known."""
        states = self._monitor.states(ranks)
        seen = [
            f"rank {rank} in {state['call'] or 'no smp call'} at {state['where']}"
            for rank, state in states.items()
            if state
        ]
        return f" ({', '.join(seen)})" if seen else ""


def enter_collective(rt: "Runtime", call: str, group: "Group", advice: str) -> None:
    """Return when every rank of `group` has entered `call`; else `CommError`, see `EntryCheck.enter`."""
    if group.size > 1:
        EntryCheck(rt.world.store, rt.rank, rt.monitor, rt.world.entries).enter(call, group.ranks, advice)


def raise_alike(rt: "Runtime", group: "Group", error: Exception | None) -> None:
    """Tell the group whether this rank failed; raises on every rank when one did, with what was said by all of them.

    Collective over `group`. The exception is a `CheckpointError`, caused by this rank's own error where there is one.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    said = rt.transport.all_gather_object(None if error is None else f"{error}", group)
    if text := by_ranks({rank: message for rank, message in zip(group.ranks, said) if message is not None}):
        raise CheckpointError(text) from error


def together(rt: "Runtime", work: Callable[[], Result], group: "Group | None" = None) -> Result:
    """What `work` returns on this rank, once it has ended on all ranks of the group (None: the world); where it fails
    on one, all raise as `raise_alike` does. Collective over the group.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    raise_alike(rt, group or rt.group(CommGroup.WORLD), error)
    return result  # type: ignore[return-value]


def by_ranks(said: Mapping[int, str]) -> str:
    """What ranks say, a line for each thing said with all who say it in front; empty when nobody says anything."""
    ranks_of: dict[str, list[int]] = {}
    for rank, message in said.items():
        ranks_of.setdefault(message, []).append(rank)
    return "\n".join(f"{_ranks(ranks)}: {message}" for message, ranks in ranks_of.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
