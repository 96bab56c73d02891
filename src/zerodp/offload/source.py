"""What gathers copy this rank's part of a page from: the master itself, or a copy in the dtype of compute, here or in another tier."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.bits import same_memory
from ..tiers import ARRIVED, Tier, Transfer
from ..tiers.host import HostTier

if TYPE_CHECKING:
    from .home import Home
    from .places import Link


class Source:
    """The master itself."""

    home: Home  # of the same piece
    is_master = True

    @property
    def is_page(self) -> bool:
        """Whether it lies on the device in the dtype of compute, so that with one rank to a shard it is the page."""
        flat = self.home.flat
        return self.home.place == "device" and flat.param_dtype == flat.shard_dtype

    def take(self, values: Tensor) -> None:
        """Keep the first values, on the device in the dtype of the master."""

    def fetch(self, out: Tensor) -> Transfer:
        """This rank's part into `out` [numel], at its place in the page; on its way by streams only when this returns."""
        return self.home.read(out)

    @property
    def is_far(self) -> bool:
        """Whether it helps to know that a `fetch` comes soon."""
        return not self.home.live

    def ahead(self) -> None:
        """`fetch` comes soon."""
        self.home.ahead()

    def publish(self) -> None:
        """The master, which is live, has new values; start to give them to forward."""

    def arrive(self) -> None:
        """Wait until forward has them, and the master may change again."""

    def close(self) -> None:
        """Nothing is kept any more."""


class Copies:
    """Casts of masters into what forward computes with, one after the other in a thread that begins with the first."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "zerodp-copy")
        self.last: Future[Any] | None = None

    def start(self, out: Tensor, master: Tensor) -> Future[Any]:
        self.last = self.thread.submit(out.copy_, master)
        return self.last

    def end(self) -> None:
        """Wait until no master is read any more; what failed is raised where the values are wanted."""
        if self.last is not None:
            wait([self.last])
            self.last = None


class Copied(Source):
    """A copy of its own. Where master and copy are both in host memory, one piece is copied while the next is updated."""

    is_master = False

    def __init__(self, host: HostTier, link: Link, copies: Copies) -> None:
        self.host, self.link, self.copies = host, link, copies
        self.copying: Future[Any] | None = None

    def arrive(self) -> None:
        if self.copying is not None:
            copying, self.copying = self.copying, None
            copying.result()

    def copy(self, out: Tensor) -> None:
        """Start casting the master into `out`, both in host memory."""
        self.arrive()
        master = self.home.flat.master[self.home.piece]
        if self.home.live:
            self.copying = self.copies.start(out, master)
        else:
            out.copy_(master)  # whose memory is lent for now only


class Arriving:
    """The transfer of a copy that a thread makes: whoever uses the values waits for it, and so does what is launched with them."""

    def __init__(self, source: Copied) -> None:
        self.source = source

    def wait(self) -> None:
        self.source.arrive()

    def launched(self) -> Transfer:
        return self

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        self.source.arrive()
        return contextlib.nullcontext()


class Beside(Copied):
    """On the device: the rank's own part of the whole parameters, where those stay here."""

    is_page, is_far = True, False
    values: Tensor

    def take(self, values: Tensor) -> None:
        flat = self.home.flat
        if flat.full is not None:
            self.values = flat.full.parts[self.home.piece][flat.group.rank]
        else:
            arena = flat.unit.runtime.arena
            self.values = arena.allocate(self.home.numel, flat.param_dtype, "parameters").copy_(values)

    def close(self) -> None:
        self.arrive()
        del self.values

    def fetch(self, out: Tensor) -> Transfer:
        if self.copying is not None and same_memory(out, self.values):
            return Arriving(self)
        self.arrive()
        if not same_memory(out, self.values):
            out.copy_(self.values)
        return ARRIVED

    def publish(self) -> None:
        master = self.home.flat.master[self.home.piece]
        if self.values.device == self.host.arena.device:
            self.copy(self.values)
        elif self.values.device == master.device:
            self.values.copy_(master)
        else:  # cast on the host, so that fewer bytes cross the link, and sent while the next piece is updated
            slot = self.host.reserve(self.home.numel, self.values.dtype, "buckets", self.home.name)
            slot.tensor.copy_(master)
            self.host.fetch(slot, self.values).wait()
            self.host.free(slot)
        self.link.back += self.values.nbytes


class Kept(Copied):
    """In another tier. Every rank fetches its own part only, so all links are used at once."""

    is_page = False

    def __init__(self, place: str, tier: Tier, host: HostTier, link: Link, copies: Copies) -> None:
        super().__init__(host, link, copies)
        self.place, self.tier, self.live = place, tier, place == "host"
        self.ticket: Any = None

    @property
    def is_far(self) -> bool:
        return not self.live

    def take(self, values: Tensor) -> None:
        self.ticket = self.tier.put(values.to(self.home.flat.param_dtype), "parameters", self.home.name)
        if values.device.type != "cpu":
            torch.accelerator.synchronize(values.device)  # what they lie in is used again at once

    def close(self) -> None:
        self.arrive()
        self.tier.free(self.ticket)

    def resting(self) -> dict[str, Any]:
        return {"parameters": self.ticket}

    def leave(self, name: str) -> None:
        """It is kept elsewhere from now on."""
        self.tier.free(self.ticket)

    def come_back(self, name: str, ticket: Any) -> None:
        self.ticket = ticket

    def fetch(self, out: Tensor) -> Transfer:
        self.arrive()
        self.link.back += out.nbytes
        return self.tier.fetch(self.ticket, out).launched()

    def ahead(self) -> None:
        self.tier.ahead(self.ticket)

    def publish(self) -> None:
        master = self.home.flat.master[self.home.piece]
        if self.live:
            out = self.tier.open(self.ticket).wait()  # when no fetch reads the old values any more
            if master.device == out.device:
                self.copy(out)
            else:
                out.copy_(master)
        else:
            slot = self.host.reserve(self.home.numel, self.home.flat.param_dtype, "buckets", self.home.name)
            slot.tensor.copy_(master)
            self.tier.write_back(self.ticket, slot.tensor)
            self.host.free(slot)
        if self.home.place == "device":
            self.link.out += master.numel() * self.home.flat.param_dtype.itemsize
