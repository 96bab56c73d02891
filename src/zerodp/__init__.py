"""ZeRO for PyTorch: every byte of training state is kept once, and fetched at the moment of use."""

from .api import shard, unshard
from .checkpoint import export, latest, load, save
from .compare import Comparison, compare
from .config import Config, Precision
from .core.access import full_grads, full_params, full_state_dict, local_shards
from .core.module import ShardedModule
from .core.optimizer import ShardedOptimizer
from .errors import CheckpointError, ConfigError, RankMismatchError, ShardedError, StorageError, ZeroError
from .inspect import Stats, describe, stats
from .version import VERSION

__version__ = VERSION

__all__ = [
    "CheckpointError",
    "Comparison",
    "Config",
    "ConfigError",
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
    "export",
    "full_grads",
    "full_params",
    "full_state_dict",
    "latest",
    "load",
    "local_shards",
    "save",
    "shard",
    "stats",
    "unshard",
]
