"""Recipes: named presets of several flags."""
from typing import NamedTuple

from .errors import log


class Recipe(NamedTuple):
    """Preset values of flags.

    source   the paper or released code that the values come from
    flags    {name of a flag: value}
    """
    source: str
    flags: dict


def log_recipe(args, recipes):
    """Print the flags of args.recipe with their values in this run, and which of them the user changed."""
    if not args.recipe:
        return
    source, flags = recipes[args.recipe]
    words = []
    for name, value in flags.items():
        actual = getattr(args, name)
        changed = "" if actual == value else f" (not {format_value(value)})"
        words.append(f"--{name.replace('_', '-')} {format_value(actual)}{changed}")
    log("recipe", f"{args.recipe}, {source}: {', '.join(words)}")


def format_value(value):
    """Return a flag's value as it is typed in a shell."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
