"""Recipes: flags that belong together, under one name."""
from typing import NamedTuple

from .cli import say


class Recipe(NamedTuple):
    """source: what the flags, {name: value}, are known from."""
    source: str
    flags: dict


def say_recipe(args, recipes):
    """Prints the flags of args.recipe with their values in this run, and which of them the user changed."""
    if not args.recipe:
        return
    source, flags = recipes[args.recipe]
    words = []
    for name, value in flags.items():
        found = getattr(args, name)
        changed = "" if found == value else f" (not {text_of(value)})"
        words.append(f"--{name.replace('_', '-')} {text_of(found)}{changed}")
    say("recipe", f"{args.recipe}, {source}: {', '.join(words)}")


def text_of(value):
    """A flag's value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
