"""Writes the generated pages of the documentation: docs/configuration.md and docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

from trainer.config.docs import configuration_markdown
from trainer.telemetry.metrics import metrics_markdown

PAGES = {"configuration.md": configuration_markdown, "metrics.md": metrics_markdown}


def main() -> None:
    folder = Path(__file__).resolve().parents[1] / "docs"
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
