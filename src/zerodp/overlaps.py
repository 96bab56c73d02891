"""Whether parameters share memory without being one Parameter."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from .core.local import local_of
from .errors import ConfigError


def check_memory(model: nn.Module) -> None:
    """
    Raises:
        ConfigError: two Parameters over the same memory. They change each other; sharded they would not.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        held = local_of(parameter)
        start = int(held.storage_offset()) * held.itemsize
        if held.numel():
            spans.setdefault(held.untyped_storage()._cdata, []).append((start, start + int(held.nbytes), name))
    for found in spans.values():
        found.sort()
        for (_, end, one), (start, _, other) in pairwise(found):
            if start < end:
                raise ConfigError(
                    f"parameters {one!r} and {other!r} are different Parameters over the same memory; tie them by one Parameter under both names, "
                    "or give each memory of its own"
                )
