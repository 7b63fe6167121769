"""The earlier name of `python -m trainer bench`."""

import sys

from trainer.console import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    sys.exit(main())
