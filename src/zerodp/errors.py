"""The errors a user can meet. Each message says what happened, where, what was got and expected, and the way out."""

from __future__ import annotations


class ZeroError(Exception):
    """Base of every error that zerodp raises on purpose."""


class ConfigError(ZeroError, ValueError):
    """A setting, model or optimizer that cannot work; raised by :func:`zerodp.shard` on every rank alike, before any data moves."""


class ShardedError(ZeroError, RuntimeError):
    """A sharded parameter or a reduced gradient was touched where its values are not there."""


class RankMismatchError(ZeroError, RuntimeError):
    """The ranks did different things, such as another order of units or another number of backward passes."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint or state dict that cannot be written or read as asked."""


class StorageError(ZeroError, OSError):
    """A file of the disk tier that cannot be written or read."""
