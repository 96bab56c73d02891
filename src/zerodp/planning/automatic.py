"""`stage="auto"`: the ranks tell each other how much memory is free, and all choose the same stages from it."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections import Counter

import torch
from torch import nn

from ..config import Config
from ..core.comm import Comm
from ..core.control import share_verdict
from ..core.local import local_of
from ..core.stages import STAGES
from ..core.wrap import IGNORED, Plan
from ..elementwise import num_moments
from ..errors import ConfigError
from ..offload.capacity import free_memory
from .estimate import Estimate
from .models import Model, of_plans
from .recommend import choose_stages
from .setup import Setup

LOG = logging.getLogger("zerodp")


def free_bytes(device: torch.device) -> int:
    """Of an accelerator, or of the host within the limits of this process's group."""
    return free_memory() if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[0])


def room(model: nn.Module, device: torch.device, comm: Comm) -> int:
    """Bytes that every rank can have for this model: the least of all ranks (a collective).

    Ranks of one host share its memory; what the model itself takes on the device comes free.
    """
    own = sum(local_of(p).nbytes for p in model.parameters() if p.device.type == device.type)
    mine = [socket.gethostname() if device.type == "cpu" else "", free_bytes(device), own]
    said = comm.exchange_objects(mine, "the other ranks' free memory")
    sharing = Counter(host for host, _, _ in said if host)
    return int(min(free // sharing.get(host, 1) + own for host, free, own in said))


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plans: list[Plan],
    config: Config,
    device: torch.device,
    comm: Comm,
) -> list[Plan]:
    """The same units with the stages to take; logged with the reason (a collective).

    Raises:
        ConfigError: not even the last stage fits, on every rank alike.
    """
    mesh = comm.mesh
    away = config.offload
    setup = Setup(
        mesh.data.size,
        replicate=mesh.replicate.size,
        device_memory=max(room(model, device, comm), 1),
        precision=config.precision,
        optimizer=0 if optimizer is None else num_moments(optimizer),
        prefetch=config.prefetch,
        unsharded_bytes=config.unsharded_bytes,
        bucket_bytes=config.bucket_bytes,
        exact=mesh.backend != "nccl" if config.exact is None else config.exact,
        # Of a share that leaves the device, where its pieces lie decides how much; counted as if all of it stayed it fits too.
        offload_optimizer=away.optimizer if away.fraction == 1 else "device",
        offload_params=away.params,
    )

    def held(one: Estimate) -> float:
        """Bytes in the device's memory, which on the CPU is also the host's."""
        if device.type != "cpu":
            return one.device_bytes
        host = one.tiers["host"] if away.host_bytes is None else min(one.tiers["host"], away.host_bytes)
        return one.device_bytes + host + one.disk_buffer_bytes

    buffers = sum(local_of(buffer).nbytes for buffer in model.buffers())
    known = Model(type(model).__name__, of_plans(plans, config.precision), exact=True, buffer_bytes=buffers)
    stages: dict[str, int] = {}
    problem, reason = None, ""
    try:
        stages, reason = choose_stages(known, setup, held)
    except ConfigError as error:
        problem = error
    # Ranks along a tensor-parallel dim may have parts of other sizes; all take what the largest needs.
    verdict = None if problem is None else [type(problem).__name__, str(problem)]
    said = comm.exchange_objects([stages, verdict], "the other ranks' choice of stages")
    share_verdict([verdict for _, verdict in said], problem)
    stages = {name: max(theirs[name] for theirs, _ in said) for name in stages}
    if mesh.world.rank == 0:
        LOG.info("stage='auto': %s", reason)
    return [
        plan if plan.name == IGNORED else dataclasses.replace(plan, residency=STAGES[stages[plan.name]])
        for plan in plans
    ]
