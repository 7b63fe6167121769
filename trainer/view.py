"""The command `python -m trainer.view`; see `trainer.tools.view`."""

import sys

from trainer.tools.view import main

if __name__ == "__main__":
    sys.exit(main())
