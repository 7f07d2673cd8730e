"""Objects and tensors between ranks: one suite over MPI (mpirun) and torch (torchrun), and inside one process."""

from typing import Any, NamedTuple

import pytest
import torch

import smp
from smp import runtime
from smp.comm import mpi
from smp.comm.transport import Channel
from smp.errors import CommError, UsageError
from tests.harness import on_ranks

BOTH = pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
GRID = {"pipeline_parallel_degree": 2, "ddp": True}  # four ranks: pp 2, rdp 2
KINDS = ["WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"]


def on_four(**options: Any) -> Any:
    """on_ranks(4) under the launcher that the test is parametrized with."""
    return on_ranks(4, config=GRID, launcher=lambda arguments: arguments["launcher"], **options)


def on_two(**options: Any) -> Any:
    """on_ranks(2), likewise."""
    return on_ranks(2, config={"ddp": True}, launcher=lambda arguments: arguments["launcher"], **options)


def on_two_mpi() -> Any:
    """on_ranks(2) for what only MPI does."""
    return on_ranks(2, config={"ddp": True})


class Point(NamedTuple):
    """Something that is neither a list nor a dict."""

    x: int
    tensor: torch.Tensor


def finish(*requests: Any) -> None:
    """Waits until all requests are complete. Each is tested every time: a long send ends only when the other side has
    tested its receive."""
    monitor = runtime.get().monitor
    monitor.wait(lambda: all([request.test() for request in requests]), "test", range(smp.size()))


def same(a: Any, b: Any) -> bool:
    """Equality that looks into tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


def samples() -> list[Any]:
    """Objects of every kind that scripts send."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(5, 7, generator=generator)
    return [
        None,
        {"a": [1, 2.5, "three"], "t": matrix},
        Point(4, matrix.bfloat16()),
        matrix.t(),  # not contiguous
        matrix[1:3, ::2],  # a view of a larger storage
        torch.empty(0, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        b"bytes",
        range(5),
        torch.float16,
        "x" * 300_000,  # beyond what MPI sends eagerly
        torch.arange(200_000),
    ]


# Objects


@BOTH
@on_two()
def test_any_picklable_object_arrives_as_it_was_sent(launcher: str) -> None:
    """A failure means that smp.send changes what it carries."""
    for sample in samples():
        if smp.rank() == 0:
            smp.send(sample, 1)
        else:
            assert same(smp.recv_from(0), sample)
    parameter = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    trained = torch.ones(3, requires_grad=True)
    if smp.rank() == 0:
        smp.send((parameter, trained), 1, smp.RankType.WORLD_RANK)
    else:
        got = smp.recv_from(0, smp.RankType.WORLD_RANK)
        assert isinstance(got[0], torch.nn.Parameter) and not got[0].requires_grad
        assert got[1].requires_grad and same(got[1].detach(), torch.ones(3))


@BOTH
@on_four()
def test_all_ranks_may_send_before_any_receives(launcher: str) -> None:
    """A failure means that a ring of large messages deadlocks although each has somebody to receive it."""
    text = "y" * 2_000_000
    after, before = (smp.rank() + 1) % 4, (smp.rank() - 1) % 4
    for number in range(3):
        smp.send((smp.rank(), number, text), after)
    for number in range(3):
        assert smp.recv_from(before) == (before, number, text)


@BOTH
@on_four()
def test_messages_of_a_pair_keep_their_order(launcher: str) -> None:
    """A failure means that two sends overtake each other."""
    if smp.rank() == 0:
        for number in range(50):
            for rank in (1, 2, 3):
                smp.send(number, rank)
    else:
        assert [smp.recv_from(0) for _ in range(50)] == list(range(50))


@BOTH
@on_four()
def test_broadcast_pairs_with_recv_from_in_every_kind_of_group(launcher: str) -> None:
    """A failure means that scripts which broadcast the length of their data loader get a wrong one, or hang."""
    for name in KINDS:
        kind = smp.CommGroup[name]
        rank_type = smp.RankType(kind.value)
        members = runtime.get().group(kind).ranks
        for number, source in enumerate(members):
            if smp.rank() == source:
                smp.broadcast((name, source), kind)
            else:
                assert smp.recv_from(number, rank_type) == (name, source)


@BOTH
@on_four()
def test_allgather_lists_the_members_by_rank_in_every_kind_of_group(launcher: str) -> None:
    """A failure means that metrics are averaged over the wrong ranks or in another order."""
    for name in KINDS:
        kind = smp.CommGroup[name]
        got = smp.allgather({"rank": smp.rank(), "t": torch.full((smp.rank(),), 1.5)}, kind)
        members = runtime.get().group(kind).ranks
        assert [entry["rank"] for entry in got] == list(members)
        assert [len(entry["t"]) for entry in got] == list(members)
    big = smp.allgather(torch.full((100_000 * (1 + smp.rank()),), smp.rank()), smp.WORLD)
    assert [(len(part), int(part[-1])) for part in big] == [(100_000 * (1 + rank), rank) for rank in range(4)]


@BOTH
@on_four()
def test_no_rank_leaves_a_barrier_before_all_have_come(launcher: str) -> None:
    """A failure means that a file is read before another rank has written it."""
    store = runtime.get().world.store
    names = ["barrier", "dp_barrier", "mp_barrier", "pp_barrier", "rdp_barrier", "tp_barrier"]
    for number, name in enumerate(names):
        key = f"barrier-test/{number}"
        kind = smp.CommGroup(name.partition("_")[0]) if "_" in name else smp.WORLD
        store.add(f"{key}/{smp.rank()}", 1)  # unlike set, add returns when the store has it
        getattr(smp, name)()
        assert store.check([f"{key}/{rank}" for rank in runtime.get().group(kind).ranks])
    for kind in smp.CommGroup:
        smp.barrier(kind)


@BOTH
@on_two()
def test_a_rank_that_is_not_in_the_group_is_refused(launcher: str) -> None:
    """A failure means that a wrong rank number becomes a hang instead of an error."""
    with pytest.raises(UsageError, match=r"PP_RANK 1 is not in 0\.\.0"):
        smp.send(1, 1, smp.RankType.PP_RANK)
    with pytest.raises(UsageError, match=r"WORLD_RANK 2 is not in 0\.\.1"):
        smp.recv_from(2)
    with pytest.raises(UsageError, match="WORLD_RANK -1"):
        smp.recv_from(-1)


@on_ranks(1, config={})
def test_one_process_is_a_world_too() -> None:
    """A failure means that a script cannot be tried without a launcher."""
    assert (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (0, 1, 0, 1)
    for name in KINDS:
        kind = smp.CommGroup[name]
        smp.barrier(kind)
        smp.broadcast("nobody listens", kind)
        assert same(smp.allgather([torch.ones(2)], kind), [[torch.ones(2)]])
    smp.send({"to": "me"}, 0)
    assert smp.recv_from(0) == {"to": "me"}
    total = torch.ones(3)
    torch.distributed.all_reduce(total, group=smp.get_dp_process_group())
    assert same(total, torch.ones(3))


# Tensors


@BOTH
@on_two()
def test_tensors_of_any_dtype_and_layout_arrive(launcher: str) -> None:
    """A failure means that a model with such a value between two stages computes something else."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    floating = torch.arange(24.0).reshape(4, 6)
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
    tensors = [
        floating,
        floating.t(),
        floating[::2, 1:4],
        floating.expand(3, 4, 6),
        torch.empty(0, 5),
        torch.tensor(2.5),
        torch.randn(300, 400),
        *[floating.to(dtype) for dtype in dtypes],
        floating.to(torch.complex64).mul(1j).conj(),
    ]
    for tag, tensor in enumerate(tensors):
        buffer = torch.zeros(tensor.shape, dtype=tensor.dtype)
        send = transport.isend(tensor, other, tag)
        receive = transport.irecv(buffer, other, tag)
        finish(send, receive)
        assert same(buffer, tensor.resolve_conj().contiguous()), f"{tensor.dtype} {tuple(tensor.shape)}"
    strided = torch.zeros(6, 4).t()
    finish(transport.isend(floating, other, 99), transport.irecv(strided, other, 99))
    assert same(strided.contiguous(), floating) and not strided.is_contiguous()


@BOTH
@on_two()
def test_tags_and_channels_keep_messages_apart(launcher: str) -> None:
    """A failure means that the forward value of one microbatch can land in the buffer of another."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    keys = [(tag, channel) for tag in (0, 1, 2**30 - 1) for channel in Channel]
    sends = [transport.isend(torch.tensor([tag, channel.value]), other, tag, channel) for tag, channel in keys]
    smp.send("an object beside them", other)
    buffers = {key: torch.zeros(2, dtype=torch.int64) for key in keys}
    receives = [transport.irecv(buffers[key], other, *key) for key in reversed(keys)]
    assert smp.recv_from(other) == "an object beside them"
    finish(*sends, *receives)
    for (tag, channel), buffer in buffers.items():
        assert buffer.tolist() == [tag, channel.value]


@BOTH
@on_two()
def test_receives_may_be_posted_long_before_and_in_any_number(launcher: str) -> None:
    """A failure means that a stage which prepares its receives early deadlocks or mixes them up."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    buffers = [torch.zeros(3) for _ in range(40)]
    receives = [transport.irecv(buffer, other, tag=number % 4) for number, buffer in enumerate(buffers)]
    assert not receives[0].test()
    smp.barrier()
    finish(*[transport.isend(torch.full((3,), float(number)), other, tag=number % 4) for number in range(40)])
    finish(*receives)
    assert [int(buffer[0]) for buffer in buffers] == list(range(40))


@BOTH
@on_two()
def test_two_ranks_may_wait_for_their_sends_before_they_look_at_their_receives(launcher: str) -> None:
    """A failure means that two stages that exchange large values deadlock."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    buffers = [torch.zeros(300_000) for _ in range(3)]
    receives = [transport.irecv(buffer, other, 41) for buffer in buffers]
    for number in range(3):
        finish(transport.isend(torch.full((300_000,), float(number)), other, 41))
    finish(*reversed(receives))
    assert [int(buffer[-1]) for buffer in buffers] == [0, 1, 2]


@BOTH
@on_two()
def test_a_dropped_send_still_arrives(launcher: str) -> None:
    """A failure means that a send whose request nobody keeps is lost, or reads memory that was freed."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    for number in range(5):
        transport.isend(torch.full((400_000,), float(number)), other, 5)
    torch.zeros(400_000).sum()
    for number in range(5):
        buffer = torch.zeros(400_000)
        finish(transport.irecv(buffer, other, 5))
        assert bool((buffer == number).all())


@on_two_mpi()
def test_messages_beyond_what_mpi_can_count_travel_in_parts() -> None:
    """A failure means that a tensor of more than 2 GiB cannot be sent. Here parts are a thousand bytes."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    before = mpi.PART, mpi.INLINE
    mpi.PART, mpi.INLINE = 1000, 16
    try:
        for elements in (249, 250, 251, 500, 777):
            tensor, buffer = torch.randn(elements), torch.zeros(elements)
            finish(transport.isend(tensor, other, 31), transport.irecv(buffer, other, 31))
            smp.send(tensor, other)
            assert same(smp.recv_from(other), buffer)
        for length in (940, 1000, 2000, 3001):  # pickled: around one part, exactly some, and more
            smp.send("z" * length, other)
            assert smp.recv_from(other) == "z" * length
    finally:
        mpi.PART, mpi.INLINE = before


@BOTH
@on_two()
def test_an_optional_tensor_may_be_none(launcher: str) -> None:
    """A failure means that a gradient that does not exist becomes zeros, which is another thing to AdamW."""
    transport, other = runtime.get().transport, 1 - smp.rank()
    for tensor in (None, torch.ones(3, 2), torch.empty(0), None):
        buffer = torch.zeros(3, 2) if tensor is None else torch.zeros_like(tensor)
        receive = transport.irecv_optional(buffer, other, 11)
        finish(transport.isend_optional(tensor, other, 11), receive)
        assert (receive.value() is None) == (tensor is None)
        if tensor is not None:
            assert same(receive.value(), tensor)
    assert not bool(buffer.any())


MISMATCHES = {
    "shorter": (lambda: torch.ones(3), lambda: torch.ones(5), "expected 5 elements of torch.float32.*sent 3 elements"),
    "longer": (lambda: torch.ones(50_000), lambda: torch.ones(5), "expected 5 elements.*sent 50000 elements"),
    "empty": (lambda: torch.ones(0), lambda: torch.ones(5), "expected 5 elements.*sent 0 elements"),
    "unexpected": (lambda: torch.ones(5), lambda: torch.ones(0), "expected 0 elements.*sent 5 elements"),
    "dtype": (
        lambda: torch.ones(4, dtype=torch.int32),
        lambda: torch.ones(4),
        "expected 4 elements of torch.float32 from rank 0.*sent 4 elements of torch.int32",
    ),
    "half": (lambda: torch.ones(4).half(), lambda: torch.ones(4).bfloat16(), "torch.bfloat16.*of torch.float16"),
    "none": (lambda: None, lambda: torch.ones(4), "expected 4 elements of torch.float32.*sent none"),
}


@BOTH
@pytest.mark.parametrize("case", list(MISMATCHES))
@on_two()
def test_a_receive_that_expects_something_else_says_so(launcher: str, case: str) -> None:
    """A failure means that two ranks whose programs differ go on with wrong numbers."""
    transport = runtime.get().transport
    sent, expected, message = MISMATCHES[case]
    if smp.rank() == 0:
        finish(transport.isend_optional(sent(), 1, 21))
    else:
        receive = transport.irecv(expected(), 0, 21)
        with pytest.raises(CommError, match=message):
            finish(receive)
    smp.barrier()
    other = 1 - smp.rank()  # and the channel is still of use
    buffer = torch.zeros(2)
    finish(transport.isend(torch.ones(2), other, 22), transport.irecv(buffer, other, 22))
    assert same(buffer, torch.ones(2))


@on_ranks(1, config={})
def test_a_rank_may_send_to_itself() -> None:
    """A failure means that code for several stages needs a special case for one."""
    transport = runtime.get().transport
    source, buffer = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    send = transport.isend(source, 0, 3)
    source += 1  # complete at once: the sender may write again
    assert send.test()
    receive = transport.irecv(buffer, 0, 3)
    finish(receive)
    assert same(buffer, source - 1)
    empty = transport.irecv_optional(buffer, 0, 4)
    finish(transport.isend_optional(None, 0, 4), empty)
    assert empty.value() is None
    with pytest.raises(CommError, match="expected 4 elements"):
        transport.isend(torch.ones(3), 0, 5)
        finish(transport.irecv(torch.ones(4), 0, 5))


@BOTH
@on_four()
def test_broadcast_object_reaches_the_members_of_each_group(launcher: str) -> None:
    """A failure means that stages start from different plans."""
    current = runtime.get()
    for kind in smp.CommGroup:
        group = current.group(kind)
        source = group.ranks[-1]
        got = current.transport.broadcast_object({"from": smp.rank(), "t": torch.arange(3)}, group, source)
        assert same(got, {"from": source, "t": torch.arange(3)})
