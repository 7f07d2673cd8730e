"""Bucket assignment against hand-made tables."""

import pytest

from smp.dp.buckets import Item, assign, completion_order

A, B = "fp32", "fp16"


def cut(items: list[Item], order: list[int], cap: int, first_cap: int | None = None) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in assign(items, order, cap, first_cap)]


def test_a_bucket_closes_before_it_would_exceed_the_cap() -> None:
    """A failure means messages and buffers larger than `bucket_cap_mb` allows."""
    items = [Item(A, numel, 4) for numel in (1, 2, 3, 4, 5)]
    assert cut(items, [4, 3, 2, 1, 0], cap=28) == [(4,), (3, 2), (1, 0)]
    assert cut(items, [4, 3, 2, 1, 0], cap=1000) == [(4, 3, 2, 1, 0)]
    assert cut(items, [4, 3, 2, 1, 0], cap=1) == [(4,), (3,), (2,), (1,), (0,)]


def test_the_first_bucket_of_each_kind_has_its_own_cap() -> None:
    """A failure means that the first reduction starts later than it could."""
    items = [Item(A, 1, 4)] * 5
    assert cut(items, [4, 3, 2, 1, 0], cap=12, first_cap=4) == [(4,), (3, 2, 1), (0,)]
    assert cut(items, [4, 3, 2, 1, 0], cap=4, first_cap=400) == [(4,), (3,), (2,), (1,), (0,)]


def test_kinds_never_share_a_bucket_whatever_the_order() -> None:
    """A failure means gradients reduced in another parameter's type or over another group."""
    items = [Item(kind, 1, 4) for kind in (A, B, A, B, A)]
    for order in ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [1, 3, 0, 2, 4]):
        buckets = assign(items, order, cap=8)
        assert all(items[index].kind == bucket.kind for bucket in buckets for index in bucket.members)
        assert sorted(index for bucket in buckets for index in bucket.members) == [0, 1, 2, 3, 4]


def test_buckets_are_numbered_by_the_completion_of_their_last_member() -> None:
    """A failure means a complete bucket waiting behind one that is still open: overlap lost."""
    items = [Item(A, 1, 4), Item(B, 1, 4), Item(B, 1, 4), Item(A, 1, 4)]
    assert cut(items, [3, 2, 1, 0], cap=8) == [(2, 1), (3, 0)]


def test_offsets_lay_members_end_to_end() -> None:
    """A failure means overlapping or unsent elements."""
    items = [Item(A, numel, 4) for numel in (3, 0, 2)]
    (bucket,) = assign(items, [2, 1, 0], cap=100)
    assert (bucket.members, bucket.offsets, bucket.numel) == ((2, 1, 0), (0, 2, 2), 5)


def test_only_ordered_parameters_get_a_bucket() -> None:
    """A failure means memory and messages for frozen parameters."""
    assert cut([Item(A, 1, 4)] * 4, [3, 1], cap=100) == [(3, 1)]
    assert cut([], [], cap=100) == []


@pytest.mark.parametrize(("finished", "expected"), [([], [3, 2, 1, 0]), ([2, 0], [2, 0, 3, 1])])
def test_parameters_that_never_completed_go_last(finished: list[int], expected: list[int]) -> None:
    """A failure means that a never used parameter holds up the reduction of all others."""
    assert completion_order(finished, 4) == expected
