"""The oldest supported versions of other packages, and the message about a package that is too old."""
import functools
import importlib.util
import platform
import re

OLDEST = {"python": "3.10", "torch": "2.9", "triton": "3.5", "transformers": "5.6", "numpy": "1.23"}
OPTIONAL = {"triton"}                                          # not available on macOS and Windows


@functools.cache
def version_problem(*packages):
    """Return one line about the first package that is missing or too old, or None. Nothing is imported."""
    for package in packages:
        found, oldest = version(package), OLDEST[package]
        advice = "" if package == "python" else f": pip install -U {package}"
        if found is None and package not in OPTIONAL and importlib.util.find_spec(package) is None:
            return f"{package} is not installed, expected {oldest} or newer{advice}"
        if found is not None and numbers(found) < numbers(oldest):
            return f"{package} {found} is installed, expected {oldest} or newer{advice}"
    return None


def version(package):
    """Return the version of an installed package, or None; a build from source may not report one."""
    import importlib.metadata  # here, because it takes 20 ms

    if package == "python":
        return platform.python_version()
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if re.match(r"\d", found or "") else None


def numbers(text):
    """Return the first three numbers of a version: [2, 13, 0] for 2.13.0+cpu and for 2.13.dev2026."""
    found = re.match(r"\d+(\.\d+)*", text)[0].split(".")
    return [int(number) for number in [*found, 0, 0][:3]]
