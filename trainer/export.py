"""The command `python -m trainer.export`; see `trainer.tools.export`."""

import sys

from trainer.tools.export import main

if __name__ == "__main__":
    sys.exit(main())
