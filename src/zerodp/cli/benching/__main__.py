"""What `ranks.on_ranks` starts for each local rank: `python -m zerodp.cli.benching TASK SETTINGS RESULT`."""

import sys

from . import ranks

if __name__ == "__main__":
    ranks.serve(*sys.argv[1:])
