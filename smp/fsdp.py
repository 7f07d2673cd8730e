"""Sharded data parallelism with the interface of torch's FSDP."""

from smp.coming import to_come

__getattr__ = to_come(__name__, ("FullyShardedDataParallel",), "sharded data parallelism")
