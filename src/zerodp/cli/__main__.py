"""`python -m zerodp.cli`, for launchers that start modules: `torchrun --nproc-per-node 8 -m zerodp.cli train`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
