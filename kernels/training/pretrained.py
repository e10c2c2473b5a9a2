"""Open pretrained models, from folders or hub names, without trusting them.

Code in a model folder is never run. Every error is one line.
"""
import contextlib
import re
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers import dynamic_module_utils as remote_code
from transformers.utils import cached_file

from .cli import UserError, fail, is_out_of_memory, log
from .files import read_json_config


@contextlib.contextmanager
def one_line_errors(label):
    """Context manager: turn any exception that a third-party or damaged model causes into a UserError.

    label   name of the model, at the start of the message
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:                             # tokenizers' PanicException is no Exception
        text = str(error).strip()
        if is_out_of_memory(error):                            # cli.to_user_error handles it
            raise
        if "custom code" in text or "This code is timed out" in text:
            fail(f"{label}: needs to run its own Python code, which is never done; expected an architecture "
                 "of the transformers library")
        if unknown := re.search(r"Unrecognized configuration class [\s\S]* kind of AutoModel: (\w+)", text):
            fail(f"{label}: transformers has no {unknown[1]} for its model type; choose another model")
        fail(f"{label}: {type(error).__name__}: {' '.join(text.split())[:300]}")


# ── config.json ─────────────────────────────────────────────────────────────────────────────────────────────

def read_config(label, name, subfolder="", overrides=(), hint=""):
    """Return the transformers config of a folder or hub name, without settings that name code to run.

    label      how messages name the model, such as "--model NAME"
    subfolder  folder inside the model's folder that has config.json
    overrides  settings that replace those of the config
    hint       text that the message about an unknown name ends with, such as another way to get a model
    """
    if local := Path(name).is_dir():
        if not Path(name, subfolder, "config.json").is_file():
            fail(f"{label}: no config.json in this folder; expected a model of the transformers library")
    else:
        log("hub", f"{name} is downloaded, unless it is in the cache")
    try:
        with forbid_remote_code():
            source = dict(subfolder=subfolder, trust_remote_code=False)
            config = AutoConfig.from_pretrained(name, **source, **dict(overrides))
    except Exception as error:
        if not local and "custom code" not in str(error):      # the network fails in many ways
            fail(f"{label}: no such folder, and the hub download failed; give a local folder{hint}")
        with one_line_errors(label):
            raise
    with one_line_errors(label):
        sanitise_config(config)
    return config


@contextlib.contextmanager
def forbid_remote_code():
    """Context manager: transformers neither runs code of a model nor asks the user whether it may.

    Passing trust_remote_code=False is not enough: models inside models are built without this argument.
    """
    before = remote_code.TIME_OUT_REMOTE_CODE
    remote_code.TIME_OUT_REMOTE_CODE = 0                       # seconds to wait for the user's answer
    try:
        yield
    finally:
        remote_code.TIME_OUT_REMOTE_CODE = before


def sanitise_config(config):
    """Remove settings that name code, add outputs or choose implementations, in inner configs as well."""
    vars(config).pop("auto_map", None)
    for setting, plain in {"_attn_implementation": None, "_experts_implementation": None,
                           "output_attentions": False, "output_hidden_states": False,
                           "chunk_size_feed_forward": 0}.items():
        if getattr(config, setting, plain) != plain:
            setattr(config, setting, plain)
    for part in list(vars(config).values()):
        for inner in part if isinstance(part, (list, tuple)) else [part]:
            if isinstance(inner, PreTrainedConfig):
                sanitise_config(inner)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def find_file(name, file):
    """Return the path of a file in a model folder or of a hub name, or None if the model has no such file."""
    if Path(name).is_dir():
        path = Path(name, file)
        return path if path.is_file() else None
    try:
        return Path(cached_file(name, file))
    except OSError:
        return None


def read_json(name, file):
    """Return the content of a .json file of a model folder or hub name, or {} if there is no such file."""
    path = find_file(name, file)
    return read_json_config(path) if path else {}
