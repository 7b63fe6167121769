"""The earlier name of `python -m trainer export`."""

import sys

from trainer.console import main

if __name__ == "__main__":
    sys.argv.insert(1, "export")
    sys.exit(main())
