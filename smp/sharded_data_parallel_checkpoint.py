"""Full state dicts from the checkpoints of sharded data parallelism."""

from smp.coming import to_come

__getattr__ = to_come(
    __name__, ("get_full_state_dict_from_sharded_data_parallel_checkpoint",), "sharded data parallelism"
)
