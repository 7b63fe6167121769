"""The command `python -m trainer.bench`; see `trainer.tools.bench`."""

import sys

from trainer.tools.bench import main

if __name__ == "__main__":
    sys.exit(main())
