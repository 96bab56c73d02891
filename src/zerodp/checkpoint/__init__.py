"""Checkpoints that load anywhere: any stage, world size and mesh to any other, and other libraries' as well."""

from __future__ import annotations

from .background import Saving
from .export import export
from .load import load
from .report import report
from .save import latest, save

__all__ = ["Saving", "export", "latest", "load", "report", "save"]
