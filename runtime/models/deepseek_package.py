"""DeepSeek's published inference code as modules of its own: imported by file, under names that nobody else sees.

Its files import each other by bare names (`model`, `kernel`, ...), which belong to half of the world. For the time of
the import those names mean these files; afterwards `sys.modules` is as it was, and the modules stay under a prefix.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.errors import UserError

log = logging.getLogger(__name__)

PREFIX = "nvmoe_published_"
NEEDED = ("model", "kernel", "engram")
IMAGES = ("vision", "image_processor")  # imported by the model also for text
_lock = threading.Lock()
_open: list[Path] = []  # the one package in use in this process


@dataclass(frozen=True, slots=True)
class Package:
    """The modules of one folder. Close it before another is loaded."""

    folder: Path
    model: Any
    kernel: Any
    engram: Any

    def close(self) -> None:
        """Forget the modules, so that another package may be loaded."""
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            del sys.modules[name]
        _open.clear()


def load_package(folder: Path, kernel: ModuleType | None = None) -> Package:
    """Import a folder's code.

    kernel: stands in for its kernel.py, which is not run then.  Raises UserError for a file that is not there, for a
    module that it needs and this environment has not, and while another package is open: its state is the process's.
    """
    for name in NEEDED:
        if not (folder / f"{name}.py").is_file():
            raise UserError(
                f"{folder} has no {name}.py",
                "run the patch stage: stages=[patch] force=[patch]",
            )
    with _lock:
        if _open:
            raise UserError(
                f"DeepSeek's own code holds one model per process, and that of {_open[0]} is open",
                "close that engine first, or set deepseek.arithmetic=native for one of the two",
            )
        finder = _Finder(folder, {} if kernel is None else {"kernel": kernel})
        try:
            with _bare_names(finder):
                modules = [importlib.import_module(name) for name in NEEDED]
        except ImportError as error:
            raise UserError(
                f"DeepSeek's own code in {folder} cannot be imported: {error}",
                "install what it needs, or set deepseek.kernels=ours (no TileLang), or deepseek.arithmetic=native",
            ) from error
        _open.append(folder)
        return Package(folder, *modules)


@contextmanager
def _bare_names(finder: _Finder) -> Iterator[None]:
    """Let the finder's names mean its files, for a while; who had them before has them again afterwards."""
    before = {name: sys.modules.pop(name) for name in finder.names if name in sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a folder's modules by their bare names, and nothing else."""

    def __init__(self, folder: Path, given: dict[str, ModuleType]) -> None:
        """given: modules that stand in for files."""
        self._folder, self._given = folder, given
        self.names = {path.stem for path in folder.glob("*.py")} | given.keys()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname not in self.names:
            return None
        file = self._folder / f"{fullname}.py"
        loader = _Loader(file, self._given.get(fullname))
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


class _Loader(importlib.abc.Loader):
    """Runs one file under its prefixed name. Leaves no compiled file behind."""

    def __init__(self, file: Path, given: ModuleType | None) -> None:
        self._file, self._given = file, given

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        del spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        bare = module.__name__
        module.__name__ = PREFIX + bare  # of its classes, too
        sys.modules[module.__name__] = module
        if self._given is not None:
            module.__dict__.update(
                {k: v for k, v in vars(self._given).items() if not k.startswith("__")}
            )
            return
        try:
            code = compile(self._file.read_bytes(), str(self._file), "exec", dont_inherit=True)
            exec(code, module.__dict__)
        except ImportError as error:
            if bare not in IMAGES:
                raise
            log.info("%s is left out (%s): text needs none of it", self._file.name, error)
            module.__dict__["__getattr__"] = _text_only


def _text_only(name: str) -> Any:
    """Stand in for any name of a module of images."""
    if name.startswith("__"):
        raise AttributeError(name)

    class TextOnly:
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            raise UserError(f"{name} is of images, and this engine computes text")

    return TextOnly
