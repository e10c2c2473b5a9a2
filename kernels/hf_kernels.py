"""Let this folder be used next to Hugging Face's package `kernels`, which has the same name.

`import kernels` in a script finds this folder even if that package is installed, because Python searches the
script's folder first. transformers would then miss the names that it needs. So a name or a submodule that
this folder does not have is taken from the installed package, which is loaded on first use. Its modules keep
their usual names in sys.modules, and each file is loaded once. If both have a module of the same name,
`import` finds the one in this folder; but while the installed package is being loaded, the installed one.
"""
import importlib
import importlib.util
import os
import sys
import threading
from importlib.machinery import PathFinder

this_package = sys.modules[__package__]
lock = threading.RLock()
package = None                                                 # the installed package, once it is loaded


def find_installed():
    """Return the spec of the installed package, or None. Folders with a copy of this package are skipped."""
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
            spec = find_installed() if package is None else None
            if spec is not None:
                run_init(spec)
        finally:
            lock.release()
    return package


def run_init(spec):
    """Run the installed package's __init__; meanwhile `import kernels.x` looks there first."""
    global package
    package = importlib.util.module_from_spec(spec)
    folders = spec.submodule_search_locations
    set_aside = pop_modules(folders)
    this_package.__path__[:] = [*folders, *this_package.FOLDER]
    try:
        spec.loader.exec_module(package)
        for name in [name for name in list(vars(this_package)) if has_module(folders, f"kernels.{name}")]:
            # Python stored this submodule in our package, which is sys.modules["kernels"]
            vars(package).setdefault(name, vars(this_package).pop(name))
        pop_modules(folders, this_package.FOLDER)
    except BaseException:
        package = None
        pop_modules(folders)                                   # a second attempt starts from the beginning
        raise
    finally:
        this_package.__path__[:] = this_package.FOLDER
        sys.modules.update(set_aside)


def has_module(folders, name):
    """Return whether a package with these folders has the module `name`.

    For kernels.a.b only kernels.a is looked up, because all modules below it belong to the same package.
    """
    return PathFinder.find_spec(".".join(name.split(".")[:2]), folders) is not None


def pop_modules(*packages):
    """Remove from sys.modules the submodules of `kernels` that exist in each of the packages; return them."""
    names = [name for name in list(sys.modules) if name.startswith("kernels.")]
    names = [name for name in names if all(has_module(folders, name) for folders in packages)]
    for name in names:
        vars(this_package).pop(name.partition(".")[2], None)
    return {name: sys.modules.pop(name) for name in names}


def attribute(module, name):
    """Return the attribute `name` of `module` in the installed package, or raise AttributeError."""
    found = None if name.startswith("__") else load()          # inspect and others look up many __names__
    for part in module.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(found, name)


class Finder:
    """Find a submodule of the installed package if this package has none of that name."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.rpartition(".")[0] != "kernels":
            return None
        loaded = package
        installed = find_installed() if loaded is None else loaded.__spec__
        spec = installed and PathFinder.find_spec(name, installed.submodule_search_locations)
        if spec is not None and loaded is None:
            spec.loader = PackageFirst()
        return spec


class PackageFirst:
    """Loader that runs the installed package's __init__ before it imports one of the package's submodules.

    Python does this for every package, but here it has run only the __init__ of this folder.
    """

    def create_module(self, spec):
        load(wait=False)                                       # waiting could deadlock two threads
        module = importlib.import_module(spec.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.spec                            # restore it, because Python has replaced it


sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
