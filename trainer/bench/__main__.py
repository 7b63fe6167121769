"""The command `python -m trainer.bench`; see `trainer.tools.bench`, and for `learner` `trainer.tools.bench_learner`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["learner"]:  # needs neither Hydra nor Ray
        from trainer.tools.bench_learner import main as bench_learner

        sys.exit(bench_learner(sys.argv[2:]))
    from trainer.tools.bench import main

    sys.exit(main())
