"""Random streams are split by position in the program, never by what was drawn before."""

import pytest
import torch

from smp.bootstrap import default_generators
from smp.rng import DETERMINISTIC_MODULES, Streams, draw_seed, mix, part_salt, preserved_after_draw


@pytest.fixture(autouse=True)
def _own_generator_state():
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


def test_mix_spreads():
    """Streams of neighbouring microbatches or calls that coincide would repeat masks."""
    seeds = {mix(seed, salt) for seed in range(64) for salt in range(64)}
    assert len(seeds) == 64 * 64
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert mix(1, 2) == mix(1, 2)
    nested = {mix(mix(mix(5, a), b), c) for a in range(20) for b in (0, 1) for c in range(20)}
    assert len(nested) == 800
    flipped = [bin(mix(7, 0) ^ mix(7 ^ (1 << bit), 0)).count("1") for bit in range(64)]
    assert min(flipped) > 12  # every input bit moves many output bits


def test_what_a_call_draws_does_not_shift_what_follows():
    """A rank that skips a call must stay in step with the rank that runs it."""
    streams = Streams()

    def after_call(draws):
        streams.seed(11)
        before = torch.rand(2)
        seed = streams.enter()
        inside = torch.rand(draws)
        streams.leave(seed)
        return before, inside, torch.rand(3)

    (b1, i1, a1), (b2, i2, a2), (_, i3, a3) = after_call(1), after_call(100), after_call(0)
    assert torch.equal(b1, b2) and torch.equal(a1, a2) and torch.equal(a1, a3)
    assert i1[0] == i2[0] and i3.numel() == 0
    streams.seed(11)
    streams.leave(streams.current())  # a rank that skips the call
    assert torch.equal(torch.rand(3), a1)


def test_calls_one_after_the_other_and_inside_each_other_differ():
    """Two dropouts with the same mask are one dropout."""
    streams = Streams()
    streams.seed(3)
    drawn = [torch.rand(4)]
    for _ in range(3):
        outer = streams.enter()
        drawn.append(torch.rand(4))
        inner = streams.enter()
        drawn.append(torch.rand(4))
        streams.leave(inner)
        drawn.append(torch.rand(4))
        streams.leave(outer)
        drawn.append(torch.rand(4))
    assert len({tuple(t.tolist()) for t in drawn}) == len(drawn)


def test_generator_state_holds_the_stream():
    """Activation checkpointing saves and restores the generator's state; the stream must come back with it."""
    streams = Streams()
    streams.seed(5)
    state = torch.get_rng_state()
    seed = streams.enter()
    first = torch.rand(3)
    streams.leave(seed)
    streams.seed(99)
    torch.set_rng_state(state)
    assert streams.current() == 5
    streams.enter()
    assert torch.equal(torch.rand(3), first)


def test_salt_gives_ranks_their_own_streams_and_the_shared_one():
    """Tensor-parallel ranks with own batches drop out differently; code on shared data drops out alike."""
    ranks = [Streams(part_salt(part)) for part in range(3)]

    def run(streams):
        streams.seed(8)
        own = torch.rand(2)
        with streams.salted(0):
            shared = torch.rand(2)
        return own, shared, torch.rand(2)

    results = [run(streams) for streams in ranks]
    assert len({tuple(own.tolist()) for own, _, _ in results}) == 3
    assert all(torch.equal(shared, results[0][1]) for _, shared, _ in results)
    assert len({tuple(after.tolist()) for _, _, after in results}) == 3
    assert part_salt(0) == 0


def test_the_users_stream_moves_by_one_draw_whatever_the_step_draws():
    """A script's shuffling and initialisation after a step must not depend on the model's dropout."""

    def after(draws):
        torch.manual_seed(4)
        with preserved_after_draw() as seed:
            Streams().seed(123)
            torch.rand(draws)
        return seed, torch.rand(2)

    (s1, a1), (s2, a2) = after(0), after(50)
    assert s1 == s2 and torch.equal(a1, a2)
    torch.manual_seed(4)
    draw_seed()
    assert torch.equal(torch.rand(2), a1)
    torch.manual_seed(4)
    with pytest.raises(KeyError), preserved_after_draw():
        torch.rand(7)
        raise KeyError
    assert torch.equal(torch.rand(2), a1)


def test_seed_comes_from_the_users_generator():
    """The same script with the same seed repeats itself; another seed gives another run; two steps differ."""
    torch.manual_seed(1)
    first = [draw_seed() for _ in range(3)]
    torch.manual_seed(1)
    assert [draw_seed() for _ in range(3)] == first
    assert len(set(first)) == 3
    torch.manual_seed(2)
    assert draw_seed() != first[0]
    torch.manual_seed(1)
    with torch.device("meta"):  # a default device must not decide where the seed is drawn
        assert draw_seed() == first[0]


def test_snapshots_show_whether_numbers_were_drawn():
    """Whether a function draws is learnt once, from its first call."""
    streams = Streams()
    streams.seed(1)
    snapshot = streams.snapshot()
    assert not streams.moved_since(snapshot)
    torch.rand(1)
    assert streams.moved_since(snapshot)


def test_deterministic_modules_draw_nothing():
    """A module wrongly in that set would shift the masks of whatever follows it on the rank that runs it."""
    names = {cls.__name__ for cls in DETERMINISTIC_MODULES}
    assert not {name for name in names if "Dropout" in name or name in ("RReLU", "FractionalMaxPool2d")}
    x4, x3 = torch.rand(2, 4, 8, 8), torch.rand(2, 4, 8)
    built = {
        "Linear": (torch.nn.Linear(8, 3), x3), "BatchNorm2d": (torch.nn.BatchNorm2d(4), x4),
        "GELU": (torch.nn.GELU(), x3), "PReLU": (torch.nn.PReLU(), x3), "Conv1d": (torch.nn.Conv1d(4, 2, 3), x3),
        "Conv2d": (torch.nn.Conv2d(4, 2, 3), x4), "MaxPool2d": (torch.nn.MaxPool2d(2), x4),
        "LayerNorm": (torch.nn.LayerNorm(8), x3), "Softmax": (torch.nn.Softmax(-1), x3),
    }  # fmt: skip
    for name, (module, x) in built.items():
        assert name in names
        state = torch.get_rng_state()
        module.train()(x)
        assert torch.equal(torch.get_rng_state(), state), name
    assert default_generators()[0] is torch.default_generator
