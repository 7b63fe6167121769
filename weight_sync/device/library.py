"""Vendors' shared libraries: where they are found, and how they are called."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from ctypes import c_int, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Call(NamedTuple):
    """A function of a library, as its header declares it."""

    name: str
    arguments: tuple[Any, ...]
    """ctypes; pointers of every kind are `c_void_p`."""
    constants: tuple[int, ...] = ()
    """The last arguments, where they are always the same."""


class Library:
    """Calls that return an error code, by our own words for them.

    ctypes releases the interpreter lock in each, so one that hangs stops only its own thread.
    """

    CALLS: ClassVar[Mapping[str, Call]]
    """Word -> the vendor's function. The only place where its signature is written down."""
    FAILED: type[DeviceError] = DeviceError
    PENDING = 0
    """What a call returns that goes on in the background."""
    WITHOUT = "it is too old, or not the library it should be"
    """What a missing function means."""

    def __init__(self, library: ctypes.CDLL, prefix: str = "") -> None:
        self._library = library
        self._prefix = prefix

    def has(self, word: str) -> bool:
        return hasattr(self._library, self._prefix + self.CALLS[word].name)

    def call(self, word: str, *arguments: Any, unless: int = 0) -> bool:
        """Whether it succeeded; False for the error code `unless`, while every other one raises."""
        call = self.CALLS[word]
        name = self._prefix + call.name
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"{self._library._name} has no {name}; {self.WITHOUT}")
        function.restype, function.argtypes = c_int, call.arguments
        code = function(*arguments, *call.constants)
        if code not in (0, self.PENDING):
            error = self.error(name, code)
            if code != unless:
                raise error
        return code == 0

    def value(self, kind: Any, word: str, *arguments: Any) -> int:
        """What the call writes to where its first argument points."""
        found = kind()
        self.call(word, ctypes.byref(found), *arguments)
        return found.value

    def pointer(self, word: str, *arguments: Any) -> int:
        """As `value`, an address."""
        found: int | None = self.value(c_void_p, word, *arguments)
        if found is None:
            raise self.FAILED(f"{self._prefix}{self.CALLS[word].name} reported success but returned a null pointer")
        return found

    def error(self, name: str, code: int) -> DeviceError:
        return self.FAILED(f"{name} failed with {code} ({self.describe(code)})")

    def describe(self, code: int) -> str:
        """The library's description of an error code. Also clears the error where the library keeps it."""
        raise NotImplementedError

    def text(self, name: str, *arguments: Any) -> str:
        """Of a function that returns text."""
        function = getattr(self._library, name, None)
        if function is None:
            return "no description"
        function.restype = ctypes.c_char_p
        raw: bytes | None = function(*arguments)
        return "no description" if raw is None else raw.decode(errors="replace").strip()


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
