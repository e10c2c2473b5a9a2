"""Lets this folder be used next to Hugging Face's package `kernels`, which has the same name.

`import kernels` in a script finds this folder even if that package is installed, because Python searches the
script's folder first. transformers then misses the names it wants. So a name or a submodule that this folder
does not have is taken from the installed package, which is loaded on first use. Its modules keep their usual
names in sys.modules, and each file is loaded once. If both have a module, `import` finds ours, and the
installed package finds its own while it loads.
"""
import importlib
import importlib.util
import os
import sys
import threading
from importlib.machinery import PathFinder

ours = sys.modules[__package__]
lock = threading.RLock()
package = None                                                 # the installed package, once it is loaded


def find():
    """Return the spec of the installed package, or None. Folders that hold a copy of ours are skipped."""
    marker = os.path.join("kernels", os.path.basename(__file__))
    folders = [folder for folder in sys.path if isinstance(folder, str)]
    folders = [folder for folder in folders if not os.path.exists(os.path.join(folder, marker))]
    for finder in sys.meta_path if __package__ == "kernels" else ():
        spec = finder.find_spec("kernels", folders)            # an editable install has a finder of its own
        if spec is not None and spec.has_location and spec.submodule_search_locations:
            return spec
    return None


def version():
    """Return the version of the installed package, or None."""
    import importlib.metadata  # here, because it takes 20 ms
    try:
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None


def load(wait=True):
    """Return the installed package, or None. With wait=False, do not wait for a thread that is loading it."""
    if lock.acquire(wait):
        try:
            spec = find() if package is None else None
            if spec is not None:
                run(spec)
        finally:
            lock.release()
    return package


def run(spec):
    """Run the installed package's __init__. Until it ends, a module that both have is the package's own."""
    global package
    package = importlib.util.module_from_spec(spec)
    folders = spec.submodule_search_locations
    aside = take_out(folders)
    ours.__path__[:] = [*folders, *ours.FOLDER]
    try:
        spec.loader.exec_module(package)
        for name in [name for name in list(vars(ours)) if has(folders, f"kernels.{name}")]:
            vars(package).setdefault(name, vars(ours).pop(name))           # Python took ours for the parent
        take_out(folders, ours.FOLDER)
    except BaseException:
        package = None
        take_out(folders)                                      # a second try starts from the beginning
        raise
    finally:
        ours.__path__[:] = ours.FOLDER
        sys.modules.update(aside)


def has(folders, name):
    return PathFinder.find_spec(".".join(name.split(".")[:2]), folders) is not None


def take_out(*places):
    """Remove from sys.modules, and return, the submodules of `kernels` that all these places have."""
    names = [name for name in list(sys.modules) if name.startswith("kernels.")]
    names = [name for name in names if all(has(folders, name) for folders in places)]
    for name in names:
        vars(ours).pop(name.partition(".")[2], None)
    return {name: sys.modules.pop(name) for name in names}


def attribute(module, name):
    """Return `name` of the installed `kernels`, or of a module that both have; else raise AttributeError."""
    found = None if name.startswith("__") else load()          # inspect and others try many __names__
    for part in module.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(found, name)


class Finder:
    """Finds a submodule of the installed package if ours has none of that name."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.rpartition(".")[0] != "kernels":
            return None
        loaded = package
        installed = find() if loaded is None else loaded.__spec__
        spec = installed and PathFinder.find_spec(name, installed.submodule_search_locations)
        if spec is not None and loaded is None:
            spec.loader = PackageFirst()
        return spec


class PackageFirst:
    """Loads the installed package before the first of its submodules, as Python does."""

    def create_module(self, spec):
        load(wait=False)                                       # else two threads may wait for each other
        module = importlib.import_module(spec.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.spec                            # Python has just replaced it


sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
