"""The earlier name of `python -m trainer check`."""

import sys

from trainer.console import main

if __name__ == "__main__":
    sys.argv.insert(1, "check")
    sys.exit(main())
