"""Ranks that were given the wrong batch are told so."""

import pytest
import torch

from smp import runtime
from smp.errors import StepError
from smp.topology import CommGroup
from smp.tp.batches import BatchCheck, check_same_batch, digest
from tests.harness import on_ranks
from tests.logs import log_lines
from tests.tp.twins import config


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(50, (4, 6), generator=generator), torch.rand(4, generator=generator)]


def test_digest_sees_values_shapes_and_dtypes():
    """Without processes."""
    x = torch.arange(6)
    assert digest([x]) == digest([x.clone()])
    assert digest([x.view(2, 3).t()]) == digest([x.view(2, 3).t().contiguous()])
    for other in (x + 1, x.view(2, 3), x.int(), x.flip(0)):
        assert digest([x]) != digest([other])
    assert digest([torch.empty(0, 2), torch.ones((), dtype=torch.bfloat16)])


@on_ranks(4, config=config(2, True))
def test_different_batches_on_the_ranks_of_a_tp_group_are_refused():
    """PITFALLS a10-2, four ranks, tp 2 x rdp 2: at the first step and every third one the error names the ranks, and
    what to give the sampler; the right batches pass."""
    current = runtime.get()
    check = BatchCheck(current, every=3)
    check(batch(current.rdp_rank))
    check(batch(current.rank))  # not due
    check(batch(current.rank))
    with pytest.raises(StepError, match="rank 1 got another one than rank 0.*rank 3 got another") as caught:
        check(batch(current.rank))
    assert "num_replicas=smp.rdp_size() and rank=smp.rdp_rank()" in str(caught.value)
    group = current.group(CommGroup.TP_GROUP)
    check_same_batch(batch(current.rdp_rank), group)
    with pytest.raises(StepError, match=r"shapes \[\[?\(4, 6\)|must get the same batch"):
        check_same_batch(batch(current.rank), group)


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(4, config=lambda a: config(2, a["prescaled"]))
def test_equal_batches_on_data_parallel_ranks_give_a_warning(prescaled):
    """Once, from one rank; with joined batches tp_ranks should differ as well."""
    current = runtime.get()
    check = BatchCheck(current, every=1)
    with log_lines() as lines:
        check(batch(0))
        check(batch(0))
    expected = "ranks 0, 2" if prescaled else "ranks 0, 1, 2, 3"
    names = "smp.rdp_size()" if prescaled else "smp.dp_size()"
    if current.rank == 0:
        assert len(lines) == 1
        assert lines[0].startswith(f"{expected} got equal batches at step 0")
        assert names in lines[0]
    else:
        assert not lines
    with log_lines() as lines:
        check(batch(current.rdp_rank if prescaled else current.rank))
        check([])
    assert not lines
