"""ZeRO for PyTorch: every byte of training state is kept once, and fetched at the moment of use."""

from .api import shard
from .asleep import sleep, wake
from .checkpoint import export, latest, load, save
from .compare import Comparison, compare
from .config import Config, Offload, Precision
from .core.access import full_grads, full_params, full_state_dict, local_shards
from .core.module import ShardedModule
from .core.optimizer import ShardedOptimizer
from .errors import CheckpointError, ConfigError, RankMismatchError, ShardedError, StorageError, ZeroError
from .inspect import Stats, describe, stats
from .planning.plan import Plan, plan
from .residual.activations import activation_checkpoint, apply_activation_checkpointing
from .residual.tiling import TiledLinear, tile_linears, untile_linears
from .unsharding import unshard
from .version import VERSION

__version__ = VERSION

__all__ = [
    "CheckpointError",
    "Comparison",
    "Config",
    "ConfigError",
    "Offload",
    "Plan",
    "Precision",
    "RankMismatchError",
    "ShardedError",
    "ShardedModule",
    "ShardedOptimizer",
    "Stats",
    "StorageError",
    "TiledLinear",
    "ZeroError",
    "activation_checkpoint",
    "apply_activation_checkpointing",
    "compare",
    "describe",
    "export",
    "full_grads",
    "full_params",
    "full_state_dict",
    "latest",
    "load",
    "local_shards",
    "plan",
    "save",
    "shard",
    "sleep",
    "stats",
    "tile_linears",
    "unshard",
    "untile_linears",
    "wake",
]
