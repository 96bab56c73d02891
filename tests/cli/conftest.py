from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.cli.runs import train


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of real text, small enough to be read at once."""
    library = Path(sysconfig.get_paths()["stdlib"])
    path = tmp_path_factory.mktemp("text") / "library.txt"
    path.write_bytes(b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "tarfile.py")))
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path, text: Path) -> tuple[Path, str]:
    """(folder, output) of a run that went to its end."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    done = train({"--out": folder, "--data": text}, cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder, done.stdout
