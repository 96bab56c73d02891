"""`zerodp.plan`: what each stage would hold and send, which to take, and what would fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config import Config
from ..core.stages import STAGES
from ..errors import ConfigError
from ..shardable import check_model
from .architecture import step_of_config
from .estimate import KINDS, Estimate, amount, estimate
from .gpt import gpt_step
from .huggingface import of_config
from .models import CUTS, MOST, Model, Shape, Trace, of_count, of_module, of_shape, short
from .picture import duration
from .recommend import Recommendation, most_that_fit, recommend
from .setup import Setup
from .simulated import Simulation
from .simulated import simulate as _simulate
from .timeline.predict import predict
from .timeline.simulate import Timeline
from .traced import Step, trace
from .training_time import training_seconds


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found; print it for a table, `as_json()` for the same as plain values.

    estimates: by stage, bytes and elements of one device and step; chosen: the stage asked for, or the recommended one;
    largest: per stage the most "parameters", "batch" and "sequence" that fit, where the memory is known; timelines: per stage a
    simulated step, where the links are known; simulated: of the first and the last rank at the chosen stage, where that was asked for.
    """

    model: Model
    setup: Setup
    estimates: dict[int, Estimate]
    recommendation: Recommendation
    chosen: int
    largest: dict[int, dict[str, int]]
    timelines: dict[int, Timeline] = field(default_factory=dict)
    simulated: tuple[Simulation, ...] = ()

    @property
    def trace(self) -> Trace | None:
        """The step that was traced, where inputs were given."""
        return self.model.traces.get(self.setup.checkpointing == "full")

    @property
    def recommended(self) -> int:
        return self.recommendation.stage

    @property
    def fits(self) -> bool | None:
        """Whether any stage fits; None where no memory is known."""
        return self.recommendation.fits

    @property
    def reason(self) -> str:
        return self.recommendation.reason

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures rest on, in words."""
        setup = self.setup
        return (
            f"{setup.policy} ({setup.optimizer}), for the paper's figures",
            f"{setup.shard_ranks} ranks share the states"
            + (f", {setup.replicate} replicas" if setup.replicate > 1 else "")
            + (f", {setup.tensor_parallel} tensor parallel ranks" if setup.tensor_parallel > 1 else ""),
            self._activations(),
            *self._about_time(),
            *self.model.assumptions,
        )

    def _about_time(self) -> list[str]:
        links, lines = self.setup.links, []
        if self.timelines:
            lines.append(f"times are simulated, with {links.name} ({links.source})")
        elif links is not None:
            lines.append("times are not simulated: no sequence is known, or states or activations are offloaded")
        if self.training_seconds(self.chosen) is not None:
            by = (
                "simulated steps"
                if self.timelines
                else f"{self.setup.device_flops:.3g} FLOPs per second and device, all of them used"
            )
            lines.append(f"training time is for {short(self.setup.tokens or 0)} tokens, by {by}")
        elif self.setup.tokens is not None:
            lines.append("no training time: it needs a sequence, and links that are simulated or device_flops")
        return lines

    def training_seconds(self, stage: int) -> float | None:
        """Of the whole training by this stage; None without `tokens` or a rate."""
        return training_seconds(self.model, self.setup, self.estimates[stage], self.timelines.get(stage))

    def _activations(self) -> str:
        setup, found = self.setup, self.trace
        sequence = setup.sequence or (self.model.shape.sequence if self.model.shape else None)
        if found is not None:
            return (
                f"activations traced: {amount(found.saved_bytes)} kept for backward, {amount(found.peak_bytes)} at the most, in "
                f"{found.peak_phase} of {found.peak_unit!r}"
            )
        if self.model.shape is not None and sequence:
            return f"activations for {setup.batch} x {sequence} tokens per device, checkpointing {setup.checkpointing}"
        return "activations are not counted: give inputs=, or a shape and a sequence"

    def as_json(self) -> dict[str, Any]:
        """Plain values: `stages` maps "0".."3" to their figures, `recommended` is a stage."""
        found = self.trace
        return {
            "trace": None if found is None else dataclasses.asdict(found),
            "simulated": [one.as_json() for one in self.simulated],
            "model": self.model.name,
            "parameters": round(self.model.numel),
            "world_size": self.setup.world_size,
            "bytes_per_parameter": self.setup.policy.total,
            "stages": {str(stage): self._stage(one) for stage, one in self.estimates.items()},
            "recommended": self.recommended,
            "chosen": self.chosen,
            "fits": self.fits,
            "reason": self.reason,
            "remedies": list(self.recommendation.remedies),
            "assumptions": list(self.assumptions),
            "links": self.setup.links.name if self.setup.links is not None else None,
        }

    def _stage(self, one: Estimate) -> dict[str, Any]:
        assert isinstance(one.stage, int)
        return {
            "model_state_bytes": max(round(one.model_state_bytes), 1),  # a few parameters on many ranks take less
            "zerodp_state_bytes": round(one.zerodp_state_bytes),
            "device_bytes": round(one.device_bytes),
            "kinds": {kind: round(nbytes) for kind, nbytes in one.kinds.items()},
            "host_bytes": round(one.tiers["host"]),
            "disk_bytes": round(one.tiers["disk"]),
            "wire_elements": round(one.wire_elements),
            "sent_elements": round(one.sent_elements),
            "sent_bytes": round(one.sent_bytes),
            "operations": one.operations,
            "host_link_bytes": round(one.host_link_bytes),
            "flops": None if one.flops is None else round(one.flops),
            "seconds": one.seconds,
            "step": self.timelines[one.stage].as_json() if one.stage in self.timelines else None,
            "training_seconds": self.training_seconds(one.stage),
            "fits": None if self.setup.usable_bytes is None else not one.problems,
            "problems": list(one.problems),
            "largest": self.largest[one.stage],
        }

    def time_rows(self) -> list[list[str]]:
        """(what, by stage), where something is known of it."""
        rows = []
        if self.timelines:
            steps = self.timelines.values()
            rows.append(["step, simulated", *(duration(one.seconds) for one in steps)])
            rows.append(["of it waiting", *(duration(one.exposed) if one.exposed else "0" for one in steps)])
        whole = [self.training_seconds(stage) for stage in self.estimates]
        if any(whole):
            rows.append(["training time", *(duration(one) for one in whole if one is not None)])
        return rows

    def __str__(self) -> str:
        kinds = [kind for kind in KINDS if any(one.kinds[kind] for one in self.estimates.values())]
        rows = [["stage", *map(str, self.estimates)]]
        rows.append(["by the paper", *(amount(one.model_state_bytes) for one in self.estimates.values())])
        rows += [[kind, *(amount(one.kinds[kind]) for one in self.estimates.values())] for kind in kinds]
        rows.append(["device", *(amount(one.device_bytes) for one in self.estimates.values())])
        rows.append(["sent per step", *(amount(one.sent_bytes) for one in self.estimates.values())])
        rows += self.time_rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [self.reason, *map(str, self.simulated)]
        return "\n".join([f"{self.model.name} on {self.setup.world_size} devices", *lines])


def plan(
    model_or_parameter_count: nn.Module | Shape | float | str | os.PathLike[str],
    *,
    world_size: int,
    device_memory: int | str | None = None,
    optimizer: str = "adam",
    precision: Any = "bf16",
    stage: int | None = None,
    units: Any = None,
    ignore: Any = (),
    inputs: Any = None,
    loss: Callable[[Any], Any] | None = None,
    simulate: bool = False,
    **options: Any,
) -> Plan:
    """What each ZeRO stage would hold on a device and send in a step, from closed forms; nothing is run on real memory.

    Args:
        model_or_parameter_count: a module (on any device, also meta), a count of parameters, a `planning.models.Shape`, or
            the path of a Hugging Face `config.json` or its folder.
        world_size: devices in all.
        device_memory: bytes of each device, or text such as "80GB"; None: unknown.
        optimizer: "adam", "adamw", "nadam", "radam", "lion", "momentum", "rmsprop", "adagrad" or "sgd".
        precision: as in :func:`zerodp.shard`.
        stage: the stage asked for; None takes the recommended one.
        units: as in :func:`zerodp.shard`, for a module (also one that is made of a config file); for a count or a shape "block",
            "branch" (attention and MLP apart) or "linear".
        ignore: as in :func:`zerodp.shard`, for a module.
        inputs: what the module is called with, of one rank: a tuple (or one tensor), or a mapping of arguments by name. Their
            values do not matter, only those of whole numbers may be looked at; they may be on the meta device. A step with them
            is traced on a copy without memory, and gives activations and FLOPs. For a config file True makes the module (with
            `transformers`) and its inputs.
        loss: with `inputs`, a scalar from the module's output; None takes the output's `loss`, the output if it is a scalar, else its mean.
        simulate: run the engine itself on the first and the last of `world_size` ranks that are only pretended, at the stage
            asked for or recommended; for a module with `inputs`, or a shape.
        options: further fields of `planning.setup.Setup`, such as `batch`, `sequence`, `tensor_parallel`, `checkpointing`.

    Raises:
        ConfigError: a setting out of its range, a model that cannot be planned for, or a step that cannot run without values.
    """
    setup = Setup.of(
        {
            "world_size": world_size,
            "device_memory": device_memory,
            "optimizer": optimizer,
            "precision": precision,
            **options,
        }
    )
    if stage is not None:
        stage = _number(Config(stage=stage).stage)
    given = model_or_parameter_count
    step = _step(given, setup, inputs, loss, units, ignore, simulate, options)
    _check_of_module(given, inputs, loss, units, ignore)
    model = model_of(given if step is None or isinstance(given, Shape) else step.model, setup, units, ignore)
    check_tensor_parallel(model, setup)
    if step is not None and not isinstance(given, Shape):
        model = dataclasses.replace(model, traces=_traces(step, setup))
    estimates = {number: estimate(model, setup, number) for number in STAGES}
    found = recommend(model, setup, estimates)
    largest = {number: most_that_fit(model, setup, number) for number in STAGES}
    steps = {number: predict(model, setup, number, setup.links) for number in STAGES if setup.links is not None}
    timelines = {number: step for number, step in steps.items() if step is not None}
    chosen = found.stage if stage is None else stage
    ranks = sorted({0, setup.world_size - 1}) if simulate else []
    assert step is not None or not ranks
    seen = tuple(_simulate(step, setup, chosen, rank) for rank in ranks if step is not None)
    return Plan(model, setup, estimates, found, chosen, largest, timelines, seen)


def _step(
    given: Any, setup: Setup, inputs: Any, loss: Any, units: Any, ignore: Any, simulate: bool, options: Any
) -> Step | None:
    """The step to run, where one was asked for."""
    precision = setup.precision
    if isinstance(given, Shape) and simulate and inputs is None:
        return gpt_step(given, setup.batch, setup.sequence, _cut(units), precision)
    if inputs is None and not simulate:
        return None
    if isinstance(given, str | os.PathLike) and inputs is True:
        model, inputs, _ = step_of_config(given, setup.batch, setup.sequence)
        return Step(model, inputs, loss, Config(precision=precision, units=units, ignore=ignore))
    if not isinstance(given, nn.Module) or inputs is None:
        raise ConfigError(
            "inputs: a step is run for a torch.nn.Module with its inputs=, for a config file with inputs=True, or (with simulate=True) for a shape; "
            f"got {type(given).__name__}"
            + ("" if isinstance(given, nn.Module) else f" and inputs={inputs!r}" if inputs is None else "")
        )
    said = [name for name in ("batch", "sequence") if name in options]
    if said:
        raise ConfigError(f"{said[0]}: the inputs say that already; leave it out")
    return Step(given, inputs, loss, Config(precision=precision, units=units, ignore=ignore))


def _check_of_module(given: Any, inputs: Any, loss: Any, units: Any, ignore: Any) -> None:
    """What only a module or its step has is refused where there is none, so that nothing given does nothing."""
    if loss is not None and inputs is None:
        raise ConfigError("loss: a step's loss is computed from the module's output; give inputs= too, or leave it out")
    if isinstance(given, nn.Module) or inputs is True:
        return
    if ignore:
        raise ConfigError(
            f"ignore: names parameters of a module, got {ignore!r} without one; pass the module, or a config file with inputs=True"
        )
    if units is not None and isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"units: a config file is planned by its layers, got {units!r}; leave it out, or cut its module by inputs=True"
        )


def _traces(step: Step, setup: Setup) -> dict[bool, Trace]:
    """Of the step as the model is, or with its blocks checkpointed; of both where memory may ask for it."""
    checkpointed = setup.checkpointing == "full"
    found = {checkpointed: trace(step, checkpointed)}
    if setup.device_memory is not None and not checkpointed and step.has_blocks:
        found[True] = trace(step, checkpointed=True)
    return found


def _number(stage: Any) -> int:
    if not isinstance(stage, int):
        raise ConfigError(f"stage: expected one of {sorted(STAGES)}, got {stage!r}")
    return stage


def model_of(given: Any, setup: Setup, units: Any = None, ignore: Any = ()) -> Model:
    """The planner's form of whatever it was given."""
    if isinstance(given, nn.Module):
        check_model(given)
        return of_module(given, Config(precision=setup.precision, units=units, ignore=ignore))
    if isinstance(given, Shape):
        return of_shape(given, setup.dtypes, _cut(units))
    if isinstance(given, str | os.PathLike):
        return of_config(given, setup.dtypes)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1 <= given < float("inf"):
        raise ConfigError(
            f"plan: expected a torch.nn.Module, a count of parameters, a shape or the path of a config.json, got {given!r}"
        )
    if given > MOST["parameters"]:
        raise ConfigError(f"params: at most {MOST['parameters']:,} can be planned for, got {given:.3g}")
    return of_count(given, setup.dtypes, setup.sequence, _cut(units))


def _cut(units: Any) -> str:
    if units is not None and not (isinstance(units, str) and units in CUTS):
        raise ConfigError(f"units: without a module expected one of {', '.join(CUTS)}, got {units!r}")
    return units or "block"


def check_tensor_parallel(model: Model, setup: Setup) -> None:
    t, shape = setup.tensor_parallel, model.shape
    if t == 1:
        return
    if model.exact:
        raise ConfigError(
            "tensor_parallel: the parts of a module cannot be told from the whole; give a count or a shape"
        )
    if shape is not None and not model.assumptions and (shape.heads % t or shape.hidden % t):
        raise ConfigError(f"tensor_parallel: {t} ranks do not divide {shape.heads} heads and a width of {shape.hidden}")
