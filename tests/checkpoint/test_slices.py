"""Stored and wanted pieces of tensors meet in the coordinates of the whole tensor, whatever the cuts."""

import random

import pytest
import torch

from smp.checkpoint.slices import Box, plan_copies
from smp.tp.origin import Block


def random_cut(shape, pieces, rng):
    """Boxes that cover `shape` without overlap."""
    boxes = [Box((0,) * len(shape), shape)]
    while len(boxes) < pieces:
        wide = [(n, d) for n, box in enumerate(boxes) for d, length in enumerate(box.size) if length > 1]
        if not wide:
            break
        number, dim = rng.choice(wide)
        box = boxes.pop(number)
        at = rng.randrange(1, box.size[dim])
        first = Box(box.start, (*box.size[:dim], at, *box.size[dim + 1 :]))
        boxes += [first, *box.without(first)]
    return boxes


def lay_out(source, name, boxes, rng):
    """Each box somewhere in a local tensor of its own, some of them turned."""
    laid = []
    for box in boxes:
        turned = source.dim() > 1 and rng.random() < 0.4
        at = tuple(rng.randrange(3) for _ in box.size)
        block = Block(name, box.start, box.size, at, turned)
        local = torch.full([a + length + rng.randrange(2) for a, length in zip(at, block.local_size)], -1.0)
        block.in_local(local).copy_(block.in_source(source))
        laid.append((block, local))
    return laid


@pytest.mark.parametrize("shape", [(), (7,), (8, 6), (4, 5, 3), (0, 8)])
def test_any_cut_can_be_read_into_any_other(shape):
    """Otherwise a checkpoint would come back with values of the wrong places, or none, on other degrees."""
    rng = random.Random(f"{shape}")
    for _ in range(60):
        source = torch.randn(shape)
        stored = lay_out(source, "w", random_cut(shape, rng.randrange(1, 7), rng), rng)
        again = lay_out(source, "w", random_cut(shape, rng.randrange(1, 4), rng), rng)  # replicas, cut otherwise
        for block, expected in lay_out(source, "w", random_cut(shape, rng.randrange(1, 7), rng), rng):
            wanted = torch.full_like(expected, -1.0)
            copies, missing = plan_copies([block], {"w": stored + again}.__getitem__)
            assert missing == []
            read = sum(copy.apply(copy.stored, wanted) for copy in copies)
            assert torch.equal(wanted, expected)
            assert read == Box(block.start, block.size).numel * 4  # each place once, though replicas overlap


def test_what_no_stored_block_has_is_named():
    """Padding or old values must never stand in for values that are not there."""
    stored = [(Block("w", (0, 0), (4, 6), (0, 0)), "file 0"), (Block("w", (6, 0), (2, 6), (0, 0)), "file 1")]
    copies, missing = plan_copies([Block("w", (2, 0), (6, 6), (0, 0))], lambda name: stored if name == "w" else [])
    assert [(copy.stored, copy.read[0], copy.write[0]) for copy in copies] == [
        ("file 0", slice(2, 4), slice(0, 2)),
        ("file 1", slice(0, 2), slice(4, 6)),
    ]
    assert missing == [("w", Box((4, 0), (2, 6)))]
    assert plan_copies([Block("v", (0,), (3,), (0,))], lambda _: [])[1] == [("v", Box((0,), (3,)))]


def test_the_preferred_blocks_are_read_first():
    """A rank reads its own part where the degrees have not changed, not a replica's."""
    stored = [(Block("w", (0,), (4,), (0,)), "mine"), (Block("w", (0,), (8,), (0,)), "other")]
    copies, _ = plan_copies([Block("w", (0,), (4,), (0,))], lambda _: stored)
    assert [copy.stored for copy in copies] == ["mine"]


def test_a_box_minus_a_hole_is_the_rest_of_it():
    """Pieces that overlapped would be read twice; pieces that are lost would keep what was there before."""
    rng = random.Random(0)
    for _ in range(200):
        size = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(1, 4)))
        box = Box(tuple(rng.randrange(4) for _ in size), size)
        begin = tuple(rng.randrange(length) for length in size)
        hole = Box(
            tuple(s + b for s, b in zip(box.start, begin)),
            tuple(rng.randrange(1, length - b + 1) for length, b in zip(size, begin)),
        )
        count = torch.zeros([s + length for s, length in zip(box.start, size)])
        for part in [hole, *box.without(hole)]:
            count[tuple(slice(s, s + length) for s, length in zip(part.start, part.size))] += 1
        assert count.sum() == box.numel and count.max() == 1
