"""Finding a vendor's runtime library without linking to it.

The library that torch has already loaded is the right one: it shares torch's context, streams and error state.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.device.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable


def mapped_libraries(stem: str, maps: str) -> list[str]:
    """Paths of the shared objects named `stem` in the text of /proc/<pid>/maps, in order, each once.

    Wheels rename libraries they carry: `libcudart-1f2e.so.12` counts as `libcudart`.
    """
    name = re.compile(re.escape(stem) + r"(-[0-9a-f]+)?\.so(\.[0-9.]+)?")
    found = dict.fromkeys(
        parts[5] for line in maps.splitlines() if len(parts := line.split(maxsplit=5)) == 6 and parts[5].startswith("/")
    )
    return [path for path in found if name.fullmatch(Path(path).name)]


def load_library(stem: str, *, installed: Iterable[Path], sonames: Iterable[str] = ()) -> ctypes.CDLL:
    """Load `stem`: what this process has mapped, else the `installed` files that exist, else the system's search path.

    Raises:
        DeviceError: none of them could be loaded; the message lists what was tried.
    """
    candidates = mapped_libraries(stem, Path("/proc/self/maps").read_text())
    candidates += [str(path) for path in installed if path.exists()]
    candidates += list(sonames)
    on_search_path = ctypes.util.find_library(stem.removeprefix("lib"))
    if on_search_path is not None:
        candidates.append(on_search_path)
    failures = []
    for candidate in dict.fromkeys(candidates):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            failures.append(f"{candidate}: {error}")
    tried = "; ".join(failures) if failures else "nothing of that name was found"
    raise DeviceError(f"cannot load {stem} ({tried}); install the vendor's runtime or put it on LD_LIBRARY_PATH")
