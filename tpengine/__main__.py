"""`python -m tpengine` runs the `tpengine` command."""

import sys

from tpengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
