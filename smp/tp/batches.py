"""Did every rank get the batch it should? Cheap checks of what a data loader gives to which rank.

A sampler that counts all ranks, or too few, trains on wrong data without a word. So the ranks compare hashes of their
batches at the first step and at every k-th one after it.

                         same tp group                    different replica (rdp)
    prescaled_batch      must be equal: error             should differ: warning
    otherwise            should differ: warning           should differ: warning
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smp import log, runtime
from smp.errors import StepError
from smp.groups import Group
from smp.runtime import Runtime
from smp.topology import CommGroup

EVERY = 100  # steps between two checks


def digest(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Shape, dtype and a checksum of each tensor."""
    return tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), _checksum(t)) for t in tensors)


def _checksum(tensor: Tensor) -> int:
    data = tensor.detach().cpu().contiguous()
    if data.numel() == 0:
        return 0
    memory: Any = data.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(memory)


def check_same_batch(tensors: Sequence[Tensor], group: Group) -> None:
    """Raises unless all ranks of a group brought the same tensors. Collective over the group.

    Raises:
        StepError: on every rank of the group; it names the ranks and the arguments to give the sampler.
    """
    answers = runtime.get().transport.all_gather_object(digest(tensors), group, "comparing batches")
    _refuse([_difference(dict(zip(group.ranks, answers)))])


def _difference(answers: dict[int, Any]) -> str | None:
    """Which ranks of a tensor-parallel group did not get the batch of its first one."""
    first = next(iter(answers))
    different = [rank for rank, answer in answers.items() if answer != answers[first]]
    if not different:
        return None
    shapes = [[shape for shape, _, _ in answers[rank]] for rank in (first, different[0])]
    detail = f" (shapes {shapes[0]} and {shapes[1]})" if shapes[0] != shapes[1] else ""
    return f"{_list(different)} got another one than rank {first}{detail}"


def _refuse(differences: Sequence[str | None]) -> None:
    found = [text for text in differences if text]
    if found:
        raise StepError(
            "prescaled_batch is True, so all ranks of a tensor-parallel group must get the same batch, but "
            f"{'; '.join(found)}. Give the sampler num_replicas=smp.rdp_size() and rank=smp.rdp_rank(), and the same "
            "seed on all ranks (smp.dp_size() and smp.dp_rank() are for prescaled_batch False)"
        )


class BatchCheck:
    """Compares the batches of the ranks that hold one stage, at the first step and every k-th one after it.

    Args:
        runtime: says who is who, and whether batches are prescaled.
        every: k.
    """

    def __init__(self, runtime: Runtime, every: int = EVERY) -> None:
        self._runtime = runtime
        self._every = every
        self._step = 0

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """To be called once per step with the tensors of the batch. Collective over DP_GROUP when it checks.

        Raises:
            StepError: see check_same_batch.
        """
        due = self._step % self._every == 0
        self._step += 1
        group = self._runtime.group(CommGroup.DP_GROUP)
        if not due or group.size == 1:
            return
        answers = self._runtime.transport.all_gather_object(digest(tensors), group, "comparing batches")
        topology = self._runtime.topology
        replicas: dict[int, list[int]] = {}  # indexes in the group, by rdp_rank
        for index, rank in enumerate(group.ranks):
            replicas.setdefault(topology.coordinates(rank).rdp, []).append(index)
        prescaled = self._runtime.config.prescaled_batch
        if prescaled:
            _refuse([_difference({group.ranks[i]: answers[i] for i in indexes}) for indexes in replicas.values()])
        readers = [indexes[0] for indexes in replicas.values()] if prescaled else list(range(group.size))
        self._warn_of_equal({group.ranks[i]: answers[i] for i in readers}, prescaled)

    def _warn_of_equal(self, answers: dict[int, Any], prescaled: bool) -> None:
        by_batch: dict[Any, list[int]] = {}
        for rank, answer in answers.items():
            if answer:
                by_batch.setdefault(answer, []).append(rank)
        kind = "rdp" if prescaled else "dp"
        for ranks in by_batch.values():
            if len(ranks) > 1 and ranks[0] == self._runtime.rank:
                log.warn_once(
                    "equal batches",
                    "%s got equal batches at step %d: the same samples count several times. Give the sampler "
                    "num_replicas=smp.%s_size() and rank=smp.%s_rank()",
                    *(_list(ranks), self._step - 1, kind, kind),
                )


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
