"""The monitor without processes: what it says, and when it gives up."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from smp import failures
from smp.errors import CommError, ConfigError
from smp.failures import Monitor, main_thread_position, waiting_for_each_other


def make(rank: int = 0, size: int = 4, timeout: float = 0.2) -> Monitor:
    """A monitor of one rank of a world that exists only as keys of a store."""
    world: Any = SimpleNamespace(rank=rank, size=size, side_store=dist.HashStore(), mpi=None)
    monitor = Monitor(world)
    monitor.timeout = timeout
    return monitor


def publish(monitor: Monitor, rank: int, call: str | None, where: str = "train.py:45") -> None:
    """Lets another rank say where it is."""
    monitor._store.set(f"state/{rank}", json.dumps({"call": call, "where": where}))


def state(call: str | None, *ranks: int, sending: bool = False) -> dict[str, Any]:
    """What a rank publishes about a wait for `ranks`."""
    return {"call": call, "where": "train.py:1", "waits": [[1, list(ranks)]] if call else [], "sending": sending}


def test_a_wait_that_is_over_returns_at_once() -> None:
    """A failure means that every message pays for the deadline."""
    monitor = make()
    monitor.wait(lambda: True, "smp.barrier(WORLD)", range(4))
    calls = iter([False] * 80)
    monitor.wait(lambda: next(calls, True), "smp.barrier(WORLD)", range(4))
    assert not monitor._waits


def test_a_timeout_names_the_call_and_the_missing_ranks() -> None:
    """A failure means that a hang is reported without saying who is to blame."""
    monitor = make()
    publish(monitor, 1, "smp.barrier(WORLD)")
    publish(monitor, 2, None, "train.py:45")
    publish(monitor, 3, "smp.recv_from(0, PP_RANK)", "data.py:7")
    with pytest.raises(CommError) as caught:
        monitor.wait(lambda: False, "smp.barrier(WORLD)", range(4))
    assert str(caught.value) == (
        "smp.barrier(WORLD) did not complete within 0.2 s (SMP_TIMEOUT): "
        "rank 2 is missing in smp.barrier(WORLD), last seen at train.py:45; "
        "rank 3 is missing in smp.barrier(WORLD), last seen in smp.recv_from(0, PP_RANK) at data.py:7"
    )
    assert not monitor._waits


def test_a_wait_ends_when_a_rank_has_failed() -> None:
    """A failure means that ranks wait for ten minutes for one that is dead."""
    monitor = make(timeout=60)
    monitor._store.set("failure", "ValueError: no such file")
    monitor._store.compare_set("failed", "", "2")
    monitor._store.add("events", 1)
    monitor._look()
    with pytest.raises(CommError, match=r"rank 2 has failed \(ValueError: no such file\).*smp.allgather"):
        monitor.wait(lambda: False, "smp.allgather(WORLD)", [1])


def test_a_wait_for_a_rank_that_has_left_ends_unless_its_message_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a rank which leaves early is waited for, or that its last message is thrown away."""
    monkeypatch.setattr(failures, "EXIT_GRACE", 0.1)
    monitor = make(timeout=60)
    monitor._store.append("exits", "2,")
    monitor._store.add("events", 1)
    monitor._look()
    arrives = time.monotonic() + 0.05
    monitor.wait(lambda: time.monotonic() > arrives, "smp.recv_from(2, WORLD_RANK)", [2])
    monitor.wait(lambda: time.monotonic() > arrives + 0.3, "smp.recv_from(1, WORLD_RANK)", [1])
    with pytest.raises(CommError, match="rank 2 has exited while rank 0 was waiting for it in smp.barrier"):
        monitor.wait(lambda: False, "smp.barrier(WORLD)", range(4))


def test_a_deadlock_is_a_set_of_ranks_that_only_wait_for_each_other() -> None:
    """A failure means that a working job is ended, or that one which cannot go on is left for ten minutes."""
    both = {0: state("a", 1), 1: state("b", 0)}
    assert waiting_for_each_other(0, both) == {0, 1}
    assert waiting_for_each_other(0, {0: state("a", 1), 1: state("b", 2), 2: state("c", 0)}) == {0, 1, 2}
    # rank 3 is in the same collective as rank 0 and not to blame; ranks 1 and 2 wait elsewhere
    guarded = {0: state("a", 0, 1), 1: state("b", 0, 1, 2, 3), 2: state("a", 2, 3), 3: state("b", 0, 1, 2, 3)}
    assert waiting_for_each_other(0, guarded) == {0, 1, 2, 3}
    somebody_computes = {0: state("a", 1), 1: state("b", 2), 2: state(None)}
    assert waiting_for_each_other(0, somebody_computes) == set()
    on_its_way = {0: state("a", 1), 1: state("b", 0, sending=True)}
    assert waiting_for_each_other(0, on_its_way) == set()
    all_in_it = {0: state("a", 0, 1), 1: state("a", 0, 1)}
    assert waiting_for_each_other(0, all_in_it) == set()
    assert waiting_for_each_other(0, {0: state("a", 1), 1: {}}) == set()


def test_a_stable_deadlock_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a collective call under a guard hangs until SMP_TIMEOUT."""
    monkeypatch.setattr(failures, "DEADLOCK_AFTER", 0.0)
    monkeypatch.setattr(failures, "DEADLOCK_STABLE", 0.1)
    monitor = make(size=2, timeout=60)
    wait = monitor._enter(failures.Wait("smp.barrier(MP_GROUP)", [0, 1]))
    monitor._store.set("state/1", json.dumps(state("smp.recv_from(0, WORLD_RANK)", 0)))
    monitor._look()
    assert wait.hopeless is None
    time.sleep(0.15)
    monitor._look()
    assert wait.hopeless is not None and "rank 1 waits in smp.recv_from(0, WORLD_RANK) at train.py:1" in wait.hopeless
    with pytest.raises(CommError, match="deadlock in smp.barrier"):
        monitor._check(wait)


def test_the_position_is_the_users_own_line() -> None:
    """A failure means that a report points into smp or torch instead of the script."""
    assert main_thread_position().startswith("tests/test_failures.py:")


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", ""])
def test_a_timeout_that_is_no_duration_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a typo in the environment turns deadlines off."""
    monkeypatch.setenv("SMP_TIMEOUT", text)
    with pytest.raises(ConfigError, match="SMP_TIMEOUT"):
        make()
