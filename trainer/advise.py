"""The earlier name of `python -m trainer advise`."""

import sys

from trainer.console import main

if __name__ == "__main__":
    sys.argv.insert(1, "advise")
    sys.exit(main())
