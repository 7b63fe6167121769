"""The command `python -m trainer.advise`; see `trainer.tools.advise`."""

import sys

from trainer.tools.advise import main

if __name__ == "__main__":
    sys.exit(main())
