"""What a plan is made for: devices, memory, links, precision and how the steps are run. Checked field by field."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checks import bytes_of, number, unknown, whole
from ..config import PRECISIONS, Config, Offload, Precision
from ..errors import ConfigError
from .closed.states import MOMENTS, BytesPolicy, policy
from .timeline.machine import machine_of

TIERS = ("device", "host", "disk")
CHECKPOINTING = ("none", "selective", "full")
BYTES = (
    "device_memory",
    "host_memory",
    "disk_memory",
    "link_bandwidth",
    "host_bandwidth",
    "unsharded_bytes",
    "bucket_bytes",
)


@dataclass(frozen=True)
class Setup:
    """The circumstances of a plan; every field can be given to :func:`zerodp.plan` by name.

    world_size: devices in all = replicate x tensor_parallel x the ranks that share one copy of the states.
    device_memory, host_memory, disk_memory: bytes for each device (text such as "80GB" is taken), None where unknown.
    headroom: part of the device memory that is left for the framework, workspaces and fragmentation.
    link_bandwidth, host_bandwidth: bytes per second of each device to the others and to the host.
    device_flops: achievable FLOPs per second of a device.
    precision: as in :func:`zerodp.shard`; None: a module's own dtypes, and fp32 where there is no module.
    optimizer: its name, or how many values it keeps beside each parameter.
    bytes_per_parameter: the convention of the paper's figures; with 16 bits and Adam 16, 18 or 20.
    batch: samples per device and backward pass; sequence: tokens of a sample; accumulate: backward passes per step.
    checkpointing: "none", "selective" (attention scores are not kept, as with scaled_dot_product_attention), "full".
    partition_activations: checkpoints are split over the tensor parallel ranks (P_a).
    offload_optimizer, offload_params, offload_activations: "device", "host" or "disk".
    links: what a step's time is simulated with: a file of `zerodp bench links`, "dgx-2", "dgx-a100" or "dgx-h100", or a
        `timeline.machine.Machine`; tokens: of the whole training, for an estimate of its time.
    """

    world_size: int
    replicate: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    device_memory: int | None = None
    host_memory: int | None = None
    disk_memory: int | None = None
    headroom: float = 0.1
    link_bandwidth: int | None = None
    host_bandwidth: int | None = None
    device_flops: float | None = None
    precision: Any = "bf16"
    optimizer: str | int = "adam"
    bytes_per_parameter: int | None = None
    batch: int = 1
    sequence: int | None = None
    accumulate: int = 1
    checkpointing: str = "selective"
    partition_activations: bool = False
    offload_optimizer: str = "device"
    offload_params: str = "device"
    offload_activations: str = "device"
    prefetch: int = 1
    unsharded_bytes: int = 0
    bucket_bytes: int | None = None
    exact: bool = False
    links: Any = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "replicate", "tensor_parallel", "batch", "accumulate"):
            whole(name, getattr(self, name), least=1)
        whole("prefetch", self.prefetch, least=0)
        if self.sequence is not None:
            whole("sequence", self.sequence, least=1)
        for name in BYTES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _bytes(name, getattr(self, name)))
        number("headroom", self.headroom)
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom: expected a part of at least 0 and below 1, got {self.headroom!r}")
        if self.device_flops is not None:
            number("device_flops", self.device_flops, above=0)
        if self.tokens is not None:
            number("tokens", self.tokens, above=0)
        if self.links is not None:
            object.__setattr__(self, "links", machine_of(self.links))
            self._check_links()
        object.__setattr__(self, "precision", Config.of(None, {"precision": self.precision}).precision)
        for name, values in (
            ("checkpointing", CHECKPOINTING),
            ("offload_optimizer", TIERS),
            ("offload_params", TIERS),
            ("offload_activations", TIERS),
        ):
            if getattr(self, name) not in values:
                raise ConfigError(f"{name}: expected one of {', '.join(values)}, got {getattr(self, name)!r}")
        if not isinstance(self.optimizer, str):
            whole("optimizer", self.optimizer, least=0)
        elif self.optimizer not in MOMENTS:
            near = difflib.get_close_matches(self.optimizer, MOMENTS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"optimizer: expected one of {', '.join(MOMENTS)}, got {self.optimizer!r}{hint}")
        self._check_mesh()
        _ = self.policy  # raises for an unknown convention

    def _check_links(self) -> None:
        if self.world_size > 1 and all(link.ranks == 1 for link in (*self.links.inside, *self.links.across)):
            raise ConfigError(
                f"links: {self.links.name!r} was measured by one rank, which sends nothing, and the plan is for {self.world_size} devices; run "
                "`zerodp bench links` on two ranks or more"
            )

    def _check_mesh(self) -> None:
        parts = self.replicate * self.tensor_parallel
        if self.world_size % parts:
            raise ConfigError(
                f"world_size: {self.world_size} devices are not divisible by replicate {self.replicate} x tensor_parallel {self.tensor_parallel}"
            )
        if self.partition_activations and (self.tensor_parallel == 1 or self.checkpointing != "full"):
            raise ConfigError(
                'partition_activations: splits full checkpoints over tensor parallel ranks; it needs checkpointing="full" and '
                f"tensor_parallel above 1, got {self.checkpointing!r} and {self.tensor_parallel}"
            )
        if self.offload_activations != "device" and self.checkpointing != "full":
            raise ConfigError(
                f'offload_activations: moves activation checkpoints; it needs checkpointing="full", got {self.checkpointing!r}'
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Setup:
        """From options by name; unknown names are refused with the nearest valid one."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise ConfigError(unknown("option", name, names))
        return cls(**options)

    @property
    def dtypes(self) -> Precision:
        """Of a model that has none of its own to go by."""
        return PRECISIONS["fp32"] if self.precision is None else self.precision

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the states."""
        return self.world_size // (self.replicate * self.tensor_parallel)

    @property
    def backend(self) -> str:
        """Sums are exact on gloo, as a rule."""
        return "gloo" if self.exact else "nccl"

    def bucket_bytes_on(self, ranks: int) -> int:
        """Most bytes in one collective over so many ranks."""
        offload = Offload(optimizer=self.offload_optimizer, params=self.offload_params)
        return Config(bucket_bytes=self.bucket_bytes, offload=offload).bucket_bytes_on(self.backend, ranks)

    @property
    def copies_sums(self) -> bool:
        """Whether reduced gradients are summed in space of the device and copied to where they rest: host memory that is the CPU's own
        needs no copy, as under gloo, where sums are exact."""
        return self.offload_optimizer == "disk" or (self.offload_optimizer == "host" and not self.exact)

    @property
    def moments(self) -> int:
        return self.optimizer if isinstance(self.optimizer, int) else MOMENTS[self.optimizer]

    @property
    def policy(self) -> BytesPolicy:
        return policy(self.dtypes.param_dtype.itemsize, self.moments, self.bytes_per_parameter)

    @property
    def usable_bytes(self) -> int | None:
        """Of a device's memory, what a plan may fill."""
        return None if self.device_memory is None else int(self.device_memory * (1 - self.headroom))


def _bytes(name: str, value: Any) -> int:
    """Bytes; text needs a unit, because "80" is most often meant as gigabytes."""
    if isinstance(value, str) and value.strip().replace(".", "", 1).isdigit():
        raise ConfigError(f'{name}: {value!r} has no unit; write "{value.strip()}GB" or "{value.strip()}GiB"')
    found = bytes_of(name, value)
    if found < 1 and name != "unsharded_bytes":
        raise ConfigError(f"{name}: expected more than 0 bytes, got {value!r}")
    return found
