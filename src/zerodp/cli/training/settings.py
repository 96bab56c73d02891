"""Everything that decides a run, and the file in its folder from which a resumed run takes it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import Offload
from ...errors import ConfigError
from ..parser import UsageError

FILE = "run.json"
FIXED = ("params", "context", "seed")  # a resumed run keeps these


@dataclass(frozen=True)
class Settings:
    """The options of `zerodp train` under the same names."""

    data: str | None = None
    params: int = 4_000_000
    context: int = 256
    steps: int = 400
    minutes: float | None = None
    batch: int = 4
    accumulate: int = 1
    lr: float = 2e-3
    seed: int = 0
    stage: int = 3
    precision: str = "fp32"
    offload: str = "device"
    delayed_update: int | None = None
    ranks: int = 2
    threads: int = 1
    device: str = "auto"
    validate_every: int = 50
    save_every: int = 100
    sample: int = 200
    step_windows: int | None = None  # of a run that goes on with another number of ranks: as many as before

    def places(self) -> Offload:
        """Where model states rest.

        Raises:
            UsageError: a delayed update of what rests on the device.
        """
        try:
            return Offload(optimizer=self.offload, delayed_update=self.delayed_update or False)
        except ConfigError as error:
            raise UsageError(f"--offload, --delayed-update: {error}") from None

    @property
    def windows(self) -> int:
        """Windows of text in one step, over all ranks."""
        return self.step_windows or self.ranks * self.batch * self.accumulate


def resolve(given: Mapping[str, Any], resumed: Path | None, ranks: int | None = None) -> Settings:
    """The settings of a run: what was `given`, else those of the run in folder `resumed`, else the defaults.

    Under torchrun `ranks` is its world size.

    Raises:
        UsageError: the folder has no run, or what was given does not go with it.
    """
    forced = {} if ranks is None else {"ranks": ranks}
    if resumed is None:
        return Settings(**{**given, **forced})
    before = Settings(**_read(resumed)["settings"])
    for name in FIXED:
        if given.get(name, getattr(before, name)) != getattr(before, name):
            raise UsageError(
                f"--{name} {given[name]}: the run in {resumed} has {getattr(before, name)}, and a resumed run keeps it"
            )
    settings = dataclasses.replace(before, **{**given, **forced}, step_windows=None)
    if settings.windows != before.windows and {"batch", "accumulate"} & given.keys():
        raise UsageError(
            f"--resume {resumed}: its steps have {before.windows} windows of text (ranks x batch x accumulate), not "
            f"{settings.ranks} x {settings.batch} x {settings.accumulate}; choose --batch or --accumulate to match, or neither"
        )
    if before.windows < settings.ranks * settings.accumulate:
        raise UsageError(
            f"--resume {resumed}: its steps have {before.windows} windows of text, too few for {settings.ranks} ranks and "
            f"{settings.accumulate} backward passes; take fewer ranks"
        )
    return (
        settings if settings.windows == before.windows else dataclasses.replace(settings, step_windows=before.windows)
    )


def check_text(resumed: Path, digest: str) -> None:
    """A resumed run goes on with the text it began with.

    Raises:
        UsageError: it is another.
    """
    if _read(resumed)["text"] != digest:
        raise UsageError(f"--resume {resumed}: the text is not the one that the run began with; name that by --data")


def write(folder: Path, settings: Settings, digest: str) -> None:
    content = json.dumps({"settings": dataclasses.asdict(settings), "text": digest}, indent=2)
    replace_file(folder / FILE, content.encode())


def exists(folder: Path) -> bool:
    return (folder / FILE).exists()


def read(folder: Path) -> Settings:
    return Settings(**_read(folder)["settings"])


def _read(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / FILE).read_text())
    except OSError:
        raise UsageError(f"--resume {folder}: there is no run in this folder (no {FILE})") from None
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a reader, or a crash, sees the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
