"""Asynchronous, synchronous and colocated training of one workload on the same devices, compared.

A front for `python -m trainer.bench`; `python scripts/bench_async.py --help` says everything.
"""

from __future__ import annotations

import sys

from trainer.tools.bench import main

if __name__ == "__main__":
    sys.exit(main())
