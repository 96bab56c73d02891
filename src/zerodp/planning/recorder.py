"""Follows a step operation by operation: the bytes that are alive, what autograd keeps of them, FLOPs, and where each belongs.

It sees what operations make, on real tensors as on fake ones. It knows modules by the name of their unit and nothing of
shards; what an arena holds beside is told to it.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..core.bits import storage_address as address
from ..core.wrap import ROOT

aten = torch.ops.aten


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


FLOPS: dict[Any, Callable[..., int]] = {  # what torch's own table lacks
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

# Bytes that a kernel takes while it runs. On the CPU oneDNN brings operands of a convolution into a layout of its own.
WORKSPACE: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: lambda grad, given, weight, *_, **__: int(grad.nbytes + given.nbytes + weight.nbytes),
}


class Place(NamedTuple):
    """Where in a step: phase is forward, backward or step."""

    unit: str
    phase: str


class Peak(NamedTuple):
    """The most bytes at one time, those held elsewhere included."""

    nbytes: int
    place: Place


NOWHERE = Place(ROOT, "forward")


class Recorder(TorchDispatchMode):
    """Active inside `watching`.

    Args:
        units: modules, with the names of the units that they are; what is in none belongs to the root.
        parameters: whose memory is not counted.
        outside: bytes that are held elsewhere at the moment.
    """

    def __init__(
        self, units: Mapping[nn.Module, str], parameters: list[Tensor], outside: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__()
        self.units, self.outside = units, outside
        self.known = {address(p) for p in parameters}
        self.alive: dict[int, tuple[int, Any]] = {}  # storage -> bytes, and what tells of its end
        self.live_bytes = 0
        self.saved: dict[int, tuple[int, str, Any]] = {}  # storage -> bytes, unit, and what tells of its end
        self.live_peak, self.peak = 0, Peak(0, NOWHERE)
        self.flops: Counter[Place] = Counter()
        self.within: list[str] = []  # units whose modules run now, the innermost last
        self.stepping = False
        # Autograd numbers its nodes in the order in which forward makes them: from number changes[i] on they are of owners[i].
        self.changes, self.owners = [0], [ROOT]
        self.last = ROOT

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles: list[Any] = []
        for module in model.modules():
            if module in self.units:
                name = self.units[module]
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
                handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> None:
        self.within.append(name)
        self._changed(name)

    def _leave(self) -> None:
        self.within.pop()
        self._changed(self.within[-1] if self.within else ROOT)

    def _changed(self, owner: str) -> None:
        self.changes.append(torch._C._autograd._get_sequence_nr())
        self.owners.append(owner)

    def place(self) -> Place:
        if self.stepping:
            return Place(ROOT, "step")
        if torch._C._current_graph_task_id() == -1:
            return Place(self.within[-1] if self.within else ROOT, "forward")
        if self.within:  # recomputation
            return Place(self.within[-1], "backward")
        node: Any = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else None
        if number is not None and 0 <= number < 2**62:  # those that accumulate gradients have none of their own
            self.last = self.owners[bisect_right(self.changes, number) - 1]
        return Place(self.last, "backward")

    # ---- memory

    def sample(self, passing: int = 0) -> None:
        """Look at what there is now, and `passing` bytes besides."""
        self.live_peak = max(self.live_peak, self.live_bytes + passing)
        total = self.live_bytes + passing + self.outside()
        if total > self.peak.nbytes:
            self.peak = Peak(total, self.place())

    def reset_peaks(self) -> None:
        self.live_peak, self.peak = self.live_bytes, Peak(0, NOWHERE)
        self.sample()

    def made(self, tensor: Tensor) -> None:
        """A tensor whose memory is new."""
        storage, key = tensor.untyped_storage(), address(tensor)
        nbytes = storage.nbytes()
        self.alive[key] = nbytes, weakref.ref(storage, lambda _: self._died(key))
        self.live_bytes += nbytes

    def _died(self, key: int) -> None:
        self.live_bytes -= self.alive.pop(key)[0]

    def pack(self, tensor: Tensor) -> Tensor:
        """A hook for saved tensors: counts each storage once, parameters not."""
        if has_memory(tensor) and address(tensor) not in self.known and address(tensor) not in self.saved:
            storage, key = tensor.untyped_storage(), address(tensor)
            self.saved[key] = storage.nbytes(), self.place().unit, weakref.ref(storage, lambda _: self.saved.pop(key))
        return tensor

    def saved_by_unit(self) -> Counter[str]:
        """Bytes that autograd keeps now."""
        found: Counter[str] = Counter()
        for nbytes, unit, _ in self.saved.values():
            found[unit] += nbytes
        return found

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = FLOPS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            self.flops[self.place()] += formula(*args, **kwargs, out_val=out)
        self._note(out, args, kwargs)
        if packet in WORKSPACE:
            self.sample(WORKSPACE[packet](*args, **kwargs))
        return out

    def _note(self, out: Any, args: Any, kwargs: Any) -> None:
        new = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and has_memory(t)]
        new = [t for t in new if address(t) not in self.alive and address(t) not in self.known]
        if new:  # what is given back, or a view of what was given, is not
            given = {address(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and has_memory(t)}
            for tensor in new:
                if address(tensor) not in given and address(tensor) not in self.alive:
                    self.made(tensor)
            self.sample()


def has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
