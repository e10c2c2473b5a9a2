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
        # a list as it is typed in a shell
        actual, preset = (" ".join(map(str, x)) if isinstance(x, list) else str(x)
                          for x in (getattr(args, name), value))
        changed = "" if actual == preset else f" (not {preset})"
        words.append(f"--{name.replace('_', '-')} {actual}{changed}")
    log("recipe", f"{args.recipe}, {source}: {', '.join(words)}")
