"""Open pretrained models, from folders or hub names. Code in a model folder is never run."""
import contextlib
import json
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from .errors import UserError, fail, is_out_of_memory, log


@contextlib.contextmanager
def loading(label):
    """Context manager around code that reads a model. Python code in the model folder is not run. An
    exception from a damaged or unsupported model becomes a UserError, whose message begins with `label`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if is_out_of_memory(error):
            raise
        if "custom code" in text:
            fail(f"{label}: needs its own Python code, which is never run here; expected an architecture "
                 "of the transformers library")
        fail(f"{label}: {type(error).__name__}: {text[:300]}")


def read_config(label, name, overrides=(), hint=""):
    """Return the transformers config of a folder or hub name, without settings that name code to run.

    label      how messages name the model, such as "--model NAME"
    overrides  {name: value} of settings that replace those in config.json
    hint       end of the message about an unknown name, such as ", or use resnet-18"
    """
    local = Path(name).is_dir()
    if Path(name).is_file():
        fail(f"{label}: a file, expected a folder with a config.json and the weights, or a hub name")
    if not local:
        log("hub", f"{name} is downloaded, unless it is in the cache")
    elif not Path(name, "config.json").is_file():
        fail(f"{label}: no config.json in this folder; expected a model of the transformers library")
    with loading(label):
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, **dict(overrides))
        except Exception as error:
            if local or "custom code" in str(error):
                raise
            fail(f"{label}: no such folder, and the hub download failed; give a local folder{hint}")
        sanitise_config(config)
    return config


def sanitise_config(config):
    """Remove settings that name code to run or that choose implementations of layers, also in sub-configs."""
    vars(config).pop("auto_map", None)
    for setting in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, setting, None) is not None:
            setattr(config, setting, None)
    for part in list(vars(config).values()):
        for inner in part if isinstance(part, (list, tuple)) else [part]:
            if isinstance(inner, PreTrainedConfig):
                sanitise_config(inner)


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
    return json.loads(path.read_text(encoding="utf-8")) if path else {}
