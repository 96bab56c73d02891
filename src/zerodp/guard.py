"""What a sharded model's forward looks at before it begins: whether it is still the model that was sharded, and who asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import ShardedError


def refuse_transforms(pages: bool) -> None:
    """torch.func's transforms do not let a pass turn what autograd saves into notes, and `grad` runs a backward inside forward."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    kinds = torch._C._functorch.TransformType
    refused = (kinds.Grad, kinds.Jvp) if pages else (kinds.Grad,)
    if any(level.key() in refused for level in levels):
        raise ShardedError(
            "a torch.func transform (grad, vjp, jacrev, ...; at stage 3 jvp too) runs through a sharded model: use backward(), or "
            "zerodp.unshard(model) first"
        )


class Guard:
    """Notices that modules or parameters were added, removed or replaced since `shard()`, at the next forward."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        self.found = self._look()
        self.ids = self._ids()

    def check(self) -> None:
        if (ids := self._ids()) == self.ids:  # asked before every pass
            return
        now = self._look()
        for name, what in self.found.items():
            if now[name][:2] != what[:2]:
                self._refuse(name, "has other parameters or submodules")
            for key, part in what[2].items():
                if now[name][2].get(key) is not part:
                    kind = "module" if isinstance(part, nn.Module) else "Parameter"
                    self._refuse(f"{name}.{key}" if name else key, f"is another {kind}")
        self.ids = ids  # the same ones in another order

    def _ids(self) -> list[int]:
        parts = [part for _, m in self.modules for parts in (m._parameters, m._modules) for part in parts.values()]
        return list(map(id, parts))

    def _look(self) -> dict[str, tuple[int, int, dict[str, Any]]]:
        """Of each module its numbers of parameters and submodules, and these."""
        return {
            name: (len(m._parameters), len(m._modules), {**m._parameters, **m._modules}) for name, m in self.modules
        }

    def _refuse(self, name: str, what: str) -> None:
        raise ShardedError(
            f"{name or 'the model'!r} {what} than when the model was sharded, so it would not be trained. Change the model before shard(), "
            "edit values inside zerodp.full_params(model, write=True), or zerodp.unshard(model), change it and shard it again"
        )
