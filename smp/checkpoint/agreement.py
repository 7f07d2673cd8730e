"""How the ranks agree on one save, through the job's store: no collective, no MPI, so any thread may do it.

every rank    {base}/{rank}  what went wrong, or nothing     (1) when its files are on the disk
              {base}/count   + 1
rank 0                                                       (2) has all: makes the checkpoint count, or not
              {base}/verdict what went wrong, or nothing     (3)
every rank                                                   (4) reads the verdict; the last one deletes the keys
"""

from collections.abc import Callable

from smp.comm.entry import Store, by_ranks

# Returns when a test comes true. The main thread's waits are watched; a background thread sleeps in between.
Waiter = Callable[[Callable[[], bool]], None]


class Agreement:
    """One save's. `save_id` is the same on all ranks and differs from every other save's of the job."""

    def __init__(self, store: Store, rank: int, size: int, save_id: str) -> None:
        self._store, self._rank, self._size, self._base = store, rank, size, f"smp/save/{save_id}"

    def report(self, problem: str) -> None:
        """(1) This rank is through with its files; `problem` is empty when all went well."""
        self._store.set(f"{self._base}/{self._rank}", problem)
        self._store.add(f"{self._base}/count", 1)

    def problems(self, wait: Waiter) -> str:
        """(2) What all ranks have reported, in words; empty when all went well. On rank 0."""
        wait(lambda: self._store.add(f"{self._base}/count", 0) >= self._size)
        said = {rank: self._store.get(f"{self._base}/{rank}").decode() for rank in range(self._size)}
        return by_ranks({rank: text for rank, text in said.items() if text})

    def settle(self, verdict: str) -> None:
        """(3) How the save ended. On rank 0."""
        self._store.set(f"{self._base}/verdict", verdict)

    def verdict(self, wait: Waiter) -> str:
        """(4) How it ended, the same text on all ranks; empty when all went well."""
        key = f"{self._base}/verdict"
        wait(lambda: self._store.check([key]))
        text = self._store.get(key).decode()
        if self._store.add(f"{self._base}/read", 1) == self._size:
            for name in ("count", "verdict", "read", *map(str, range(self._size))):
                self._store.delete_key(f"{self._base}/{name}")
        return text
