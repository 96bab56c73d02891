"""ZeRO for PyTorch: every byte of training state is kept once, and fetched at the moment of use."""

from .api import shard, unshard
from .compare import Comparison, compare
from .config import Config, Precision
from .core.access import full_grads, full_params, full_state_dict, local_shards
from .core.module import ShardedModule
from .core.optimizer import ShardedOptimizer
from .errors import CheckpointError, ConfigError, RankMismatchError, ShardedError, StorageError, ZeroError
from .inspect import Stats, describe, stats
from .planning.plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Comparison",
    "Config",
    "ConfigError",
    "Plan",
    "Precision",
    "RankMismatchError",
    "ShardedError",
    "ShardedModule",
    "ShardedOptimizer",
    "Stats",
    "StorageError",
    "ZeroError",
    "compare",
    "describe",
    "full_grads",
    "full_params",
    "full_state_dict",
    "local_shards",
    "plan",
    "shard",
    "stats",
    "unshard",
]
