"""Recipes: flags that belong together, under one name."""
from typing import NamedTuple

from .cli import say


class Recipe(NamedTuple):
    """source: what the flags, {name: value}, are known from."""
    source: str
    flags: dict


def say_recipe(args, recipes):
    """What the flags of args.recipe are in this run, which may have been given others."""
    if args.recipe:
        source, flags = recipes[args.recipe]
        text = lambda value: " ".join(map(str, value)) if isinstance(value, list) else value
        words = (f"--{name.replace('_', '-')} {text(getattr(args, name))}"
                 + f" (not {text(value)})" * (getattr(args, name) != value) for name, value in flags.items())
        say("recipe", f"{args.recipe}, {source}: {', '.join(words)}")
