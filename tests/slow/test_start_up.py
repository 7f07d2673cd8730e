"""What the start of a job costs, and that it is said."""

import re

import pytest

from tests.harness import launch

pytestmark = pytest.mark.slow


def test_two_hundred_layers_are_partitioned_soon_and_the_first_steps_cost_is_printed() -> None:
    """a10-3: partition under 10 s; what the first step costs beyond the third is printed and under 20 s."""
    script = """
import time
import torch
from torch import nn
import smp
smp.init({"pipeline_parallel_degree": 2})
model = smp.DistributedModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(200)]))
@smp.step
def train(x):
    loss = model(x).sum()
    model.backward(loss)
    return loss
begin = time.monotonic()
model.register_post_partition_hook(lambda m, o: print(f"partitioned after {time.monotonic() - begin:.2f} s"))
for _ in range(3):
    train(torch.randn(2, 8))
"""
    done = launch(script, 2)
    assert done.returncode == 0, done.stdout
    partitioned = [float(seconds) for seconds in re.findall(r"partitioned after ([\d.]+) s", done.stdout)]
    assert len(partitioned) == 2 and max(partitioned) < 10, done.stdout
    found = re.search(r"the first step took ([\d.]+) s, (-?[\d.]+) s more than the third", done.stdout)
    assert found is not None and float(found[2]) < 20, done.stdout
