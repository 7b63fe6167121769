"""The command `python -m trainer.check_plugin`; see `trainer.tools.check_plugin`."""

import sys

from trainer.tools.check_plugin import main

if __name__ == "__main__":
    sys.exit(main())
