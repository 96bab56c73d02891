"""What the launcher starts for each local rank: `python -m zerodp.cli.training FOLDER [--resume]`."""

import sys
from pathlib import Path

from . import settings, worker

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(worker.run(settings.read(folder), folder, resumes="--resume" in sys.argv[2:]))
