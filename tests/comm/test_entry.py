"""Entry check of collective calls, with threads in place of ranks and one real store."""

import threading
import time

import pytest
import torch.distributed as dist

from smp.comm.entry import EntryCheck
from smp.errors import CommError


class Watch:
    """Stands for the monitor."""

    def wait(self, test, call, ranks):
        while not test():
            time.sleep(0.001)

    def states(self, ranks):
        return {rank: {"call": "smp.barrier()", "where": "train.py:12"} if rank == 5 else {} for rank in ranks}


def check_of(store, rank):
    return EntryCheck(store, rank, Watch())


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def together(*calls):
    """Run the calls in one thread each; the exception or None of each."""
    outcomes = [None] * len(calls)

    def run(k):
        try:
            calls[k]()
        except Exception as error:
            outcomes[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_all_arrive_and_go_on_again_and_again(store):
    """A check that fails or hangs when nobody is missing would break every collective."""
    checks = [check_of(store, rank) for rank in range(3)]

    def enter(rank):
        for _ in range(20):
            checks[rank].enter("state_dict()", (0, 1, 2), "", timeout=10)

    assert together(*[lambda r=rank: enter(r) for rank in range(3)]) == [None] * 3
    assert store.num_keys() < 12, "entries that everybody has left stay in the store"


def test_missing_ranks_are_named_by_all_that_came(store):
    """A subset of the ranks must get an error that says who is missing, not a hang."""
    begin = time.monotonic()
    checks = {rank: check_of(store, rank) for rank in (4, 6)}
    outcomes = together(
        *[lambda r=r: checks[r].enter("state_dict()", (4, 5, 6, 7), "Call it everywhere.", 0.3) for r in checks]
    )
    for outcome in outcomes:
        assert isinstance(outcome, CommError)
        assert "missing ranks [5, 7] (rank 5 in smp.barrier() at train.py:12)" in str(outcome)
        assert "Call it everywhere." in str(outcome)
    assert time.monotonic() - begin < 5


def test_a_rank_that_was_missed_meets_the_others_at_their_next_call(store):
    """Counting apart for ever after one caught error would make every later collective fail."""
    checks = [check_of(store, rank) for rank in range(2)]
    for _ in range(2):
        with pytest.raises(CommError, match=r"missing ranks \[1\]"):
            checks[0].enter("save", (0, 1), "", timeout=0.05)
    for _ in range(3):
        assert together(*[lambda c=c: c.enter("save", (0, 1), "", timeout=5) for c in checks]) == [None] * 2
    with pytest.raises(CommError, match=r"missing ranks \[0\]"):
        checks[1].enter("save", (0, 1), "", timeout=0.05)


def test_different_calls_at_the_same_time_are_told_apart(store):
    """One rank saving while another gathers would exchange messages that mean different things."""
    checks = [check_of(store, rank) for rank in range(2)]
    outcomes = together(
        lambda: checks[0].enter("state_dict()", (0, 1), "", 5), lambda: checks[1].enter("save", (0, 1), "", 5)
    )
    for outcome in outcomes:
        assert "rank 0: state_dict(), rank 1: save" in str(outcome)


def test_groups_do_not_disturb_each_other(store):
    """The ranks of one replica must not wait for those of another."""
    checks = [check_of(store, rank) for rank in range(4)]
    checks_of = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    assert together(*[lambda r=r: checks[r].enter("x", checks_of[r], "", 5) for r in range(4)]) == [None] * 4
