"""What one microbatch's program did, in program order: the same list on every rank of the pipeline.

A plan is made from it, and later steps are held against it. `Work` is done by one stage; an `Edge` is where stages
depend on each other, and the only place where a program can wait.

    embed            Work(0)
    x -> stage 1     Edge(MOVE, 0, 1)
    head, loss       Work(1)
    backward(loss)   Edge(BACKWARD)
                     Work(1)
    x.grad back      Edge(GRADIENT, 1, 0)
                     Work(0)
"""

import enum
from typing import NamedTuple

EVERYBODY = -1


class EdgeKind(enum.Enum):
    """Why stages meet."""

    MOVE = "move"  # a value goes from `source` to `dest`
    STRUCTURE = "structure"  # `source` tells everybody what a call gave
    BACKWARD = "backward"  # the first backward begins; nothing is sent
    GRADIENT = "gradient"  # a moved value's gradient goes back


class Edge(NamedTuple):
    """Where stages depend on each other. `nbytes` is 0 where it is not known."""

    kind: EdgeKind
    source: int = EVERYBODY
    dest: int = EVERYBODY
    nbytes: int = 0


class Work(NamedTuple):
    """A call's forward, or its backward, on the stage that owns it. `weight` is the part of `seconds` that is gradients
    of weights, which may be done later."""

    stage: int
    seconds: float
    weight: float = 0.0


Journal = list[Edge | Work]
