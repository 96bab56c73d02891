"""ZeRO for PyTorch: every byte of training state is kept once, and fetched at the moment of use."""

from .api import shard, unshard
from .compare import Comparison, compare
from .config import Config, Offload, Precision
from .core.access import full_grads, full_params, full_state_dict, local_shards
from .core.module import ShardedModule
from .core.optimizer import ShardedOptimizer
from .errors import CheckpointError, ConfigError, RankMismatchError, ShardedError, StorageError, ZeroError
from .inspect import Stats, describe, stats
from .residual.activations import activation_checkpoint, apply_activation_checkpointing

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Comparison",
    "Config",
    "ConfigError",
    "Offload",
    "Precision",
    "RankMismatchError",
    "ShardedError",
    "ShardedModule",
    "ShardedOptimizer",
    "Stats",
    "StorageError",
    "ZeroError",
    "activation_checkpoint",
    "apply_activation_checkpointing",
    "compare",
    "describe",
    "full_grads",
    "full_params",
    "full_state_dict",
    "local_shards",
    "shard",
    "stats",
    "unshard",
]
