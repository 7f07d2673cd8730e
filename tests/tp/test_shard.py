"""ShardSpec: pure arithmetic, no processes."""

import pytest
import torch

from smp.tp.shard import ShardSpec, spec_of


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize(("shape", "dim"), [((8, 3), 0), ((3, 8), 1), ((3, 8), -1), ((2, 4, 5), 1), ((8,), 0)])
def test_split_then_merge_gives_the_whole_tensor_back(shape, dim, num_parts):
    """A failure would mean that checkpoints and replaced modules hold other weights than the user's."""
    whole = torch.randn(shape)
    specs = [ShardSpec(shape, dim, part, num_parts) for part in range(num_parts)]
    parts = [spec.split(whole) for spec in specs]
    assert all(tuple(part.shape) == spec.local_shape for part, spec in zip(parts, specs))
    assert torch.equal(specs[0].merge(parts), whole)


def test_sections_give_every_part_whole_pieces_of_each():
    """Fused q, k, v of 4, 2 and 2 rows over two parts; a failure would mix heads of different parts."""
    whole = torch.arange(8)
    specs = [ShardSpec((8,), 0, part, 2, sections=(4, 2, 2)) for part in range(2)]
    assert [spec.split(whole).tolist() for spec in specs] == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert specs[1].ranges == ((2, 4), (5, 6), (7, 8))
    assert specs[0].cut == "sections"
    assert torch.equal(specs[0].merge([spec.split(whole) for spec in specs]), whole)


def test_sections_along_another_dimension():
    """As above, along the second dimension."""
    whole = torch.randn(3, 12)
    specs = [ShardSpec((3, 12), 1, part, 2, sections=(4, 4, 4)) for part in range(2)]
    assert torch.equal(specs[1].split(whole), torch.cat([whole[:, 2:4], whole[:, 6:8], whole[:, 10:12]], 1))
    assert torch.equal(specs[1].merge([spec.split(whole) for spec in specs]), whole)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("shape", "dim"), [((101, 3), 0), ((3, 7), 1), ((2, 5, 2), 1), ((3,), 0)])
def test_padded_parts_hold_every_row_once_and_zeros(shape, dim, num_parts):
    """All have one shape; what was added is zero, and gone when the parts are merged."""
    whole = torch.rand(shape) + 1
    specs = [ShardSpec(shape, dim, part, num_parts, padded=True) for part in range(num_parts)]
    parts = [spec.split(whole) for spec in specs]
    assert all(tuple(part.shape) == specs[0].local_shape and part.is_contiguous() for part in parts)
    rows = [whole.narrow(dim, start, stop - start) for spec in specs for start, stop in spec.ranges]
    assert torch.equal(torch.cat(rows, dim), whole)
    assert sum(part.count_nonzero() for part in parts) == whole.numel()
    assert all(torch.equal(spec.without_padding(part), row) for spec, part, row in zip(specs, parts, rows))
    merged = specs[0].merge(parts)
    assert torch.equal(merged, whole) and merged.is_contiguous()


def test_part_has_memory_of_its_own():
    """Else every rank would keep the whole tensor alive."""
    whole = torch.randn(4, 4)
    part = ShardSpec((4, 4), 0, 0, 2).split(whole)
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
    assert part.is_contiguous()
    assert ShardSpec((4, 4), 1, 0, 2).split(whole).is_contiguous()


def test_what_cannot_be_cut_is_refused():
    """Each wrong cut says what is wrong with it."""
    with pytest.raises(ValueError, match="6 does not divide by 4"):
        ShardSpec((6, 4), 0, 0, 4)
    with pytest.raises(ValueError, match="3 does not divide by 4"):
        ShardSpec((7, 4), 0, 0, 4, sections=(3, 4), padded=True)
    with pytest.raises(ValueError, match="add up to 5"):
        ShardSpec((6,), 0, 0, 1, sections=(2, 3))
    with pytest.raises(ValueError, match="part 2"):
        ShardSpec((6,), 0, 2, 2)
    with pytest.raises(ValueError, match="dim 3"):
        ShardSpec((6,), 3, 0, 2)
    with pytest.raises(ValueError, match="expected a whole tensor of shape"):
        ShardSpec((6,), 0, 0, 2).split(torch.zeros(5))
    with pytest.raises(ValueError, match="expected 2 parts"):
        ShardSpec((6,), 0, 0, 2).merge([torch.zeros(3)])
    with pytest.raises(ValueError, match="part 1 has"):
        ShardSpec((6,), 0, 0, 2).merge([torch.zeros(3), torch.zeros(2)])


def test_spec_of_reads_the_parameter():
    """None for whole ones."""
    param = torch.nn.Parameter(torch.zeros(2))
    assert spec_of(param) is None
    param._smp_shard = spec = ShardSpec((4,), 0, 1, 2)
    assert spec_of(param) is spec
    assert spec.of_part(0).part == 0
