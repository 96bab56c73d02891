"""What a sharded model has to keep, under the keys of the plain model's state dict.

Saving and loading ask the same table, so what one writes the other looks for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.buffers import original_buffers
from ..core.layout import Segment
from ..core.local import Local, local_of
from ..core.optimizer import ShardedOptimizer
from ..core.runtime import Runtime
from ..core.unit import Flat
from ..errors import ConfigError
from ..offload.home import Home


@dataclass
class Parameter:
    """One parameter: its place, and its keys in the state dict, several where it is tied."""

    flat: Flat
    index: int
    keys: list[str]

    @property
    def name(self) -> str:
        """What the optimizer's state calls it."""
        return self.flat.names[self.index]

    @property
    def local(self) -> Local:
        """The part that this rank's segments are of."""
        return self.flat.locals[self.index]

    @property
    def shape(self) -> torch.Size:
        return self.local.shape

    def segments(self) -> list[tuple[Segment, Home]]:
        """This rank's, each with the home of the piece that it lies in."""
        return [(s, self.flat.homes[s.piece]) for s in self.flat.segments if s.index == self.index]


@dataclass
class Inventory:
    """parameters; buffers in the dtype from before `shard()`; what modules give as extra state."""

    parameters: list[Parameter]
    buffers: dict[str, Tensor]
    extra_states: dict[str, Any]

    @property
    def keys(self) -> set[str]:
        return {key for p in self.parameters for key in p.keys} | set(self.buffers) | set(self.extra_states)


def take(runtime: Runtime) -> Inventory:
    """Of one model; the buffers are the model's own only inside `original_buffers`."""
    plain = runtime.plain_state_dict(keep_vars=True)
    keys: dict[int, list[str]] = defaultdict(list)
    buffers, extra_states = {}, {}
    for key, value in plain.items():
        if isinstance(value, nn.Parameter) and hasattr(value, "_zerodp"):
            keys[id(value)].append(key)
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            buffers[key] = local_of(value)
        else:
            extra_states[key] = value
    parameters = [
        Parameter(flat, index, keys[id(parameter)])
        for flat in runtime.flats()
        for index, parameter in enumerate(flat.parameters)
        if keys[id(parameter)]  # a module may leave a parameter out of its state dict
    ]
    return Inventory(parameters, buffers, extra_states)


def copy_taken(runtime: Runtime) -> Inventory:
    """The same with buffers that nothing changes later than the caller's next step."""
    with original_buffers(runtime):
        return take(runtime)


def optimizer_of(runtime: Runtime, optimizer: Any, what: str) -> ShardedOptimizer | None:
    """The optimizer, checked to be the one that was sharded with the model.

    Raises:
        ConfigError: it is another one.
    """
    if optimizer is not None and optimizer is not runtime.optimizer:
        raise ConfigError(
            f"{what}: this optimizer was not sharded with this model; pass the one that zerodp.shard(model, optimizer) returned"
        )
    return runtime.optimizer if optimizer is not None else None


def groups_of(optimizer: ShardedOptimizer) -> list[list[str]]:
    """The parameters' names of each group."""
    return [[flat.names[index] for flat, index in members] for members in optimizer._zerodp.members]
