"""Open pretrained models, from folders or hub names, without trusting them.

Code in a model folder is never run. The sizes in its config are compared with its weight files before memory
is allocated. Every error is one line.
"""
import contextlib
import math
import re
from collections import Counter
from pathlib import Path

import torch
from torch.nn.modules import module as registration
from transformers import AutoConfig, PreTrainedConfig
from transformers import dynamic_module_utils as remote_code
from transformers.utils import cached_file

from .cli import UserError, check_memory, fail, is_out_of_memory, log
from .files import read_json_config
from .output_dir import check_files


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


def first_not_finite(model):
    """Return the name of the first weight or buffer that contains NaN or infinity, or None."""
    tensors = model.state_dict()
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)


def refuse_nonfinite(label, model):
    """Fail if a weight of the model is not finite."""
    if bad := first_not_finite(model):
        fail(f"{label}: {bad} contains NaN or infinity; choose a checkpoint from before training diverged")


def unshare_storage(model):
    """Copy weights that share memory with others, or are not contiguous: optimizers update weights in place.

    The tensors of a .bin file may be views of each other, or expanded.
    """
    seen = set()
    for weight in model.parameters():
        memory = weight.untyped_storage()
        if memory.nbytes() != weight.nbytes or not weight.is_contiguous() or memory.data_ptr() in seen:
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)
        seen.add(weight.untyped_storage().data_ptr())


# ── config.json ─────────────────────────────────────────────────────────────────────────────────────────────

# Settings in a config.json that are counts, by their names; and their largest value.
COUNT_NAMES = r"(^|_)(num|n|layers?|depths?|blocks?|groups?|experts?|labels)(_|$)"
MAX_COUNT = 10**6


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
        check_files(name, label)
        with one_line_errors(label):
            check_counts(label, read_json_config(Path(name, subfolder, "config.json")))
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
        if not all(isinstance(kind, str) for kind in config.architectures or []):
            fail(f"{label}: architectures in its config.json must be a list of strings")
        std = getattr(config, "initializer_range", getattr(config, "init_std", 0.02))
        if not 0 <= std < 100:
            fail(f"{label}: initializer_range in its config.json is {std}; expected a number such as 0.02")
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


def check_counts(label, settings):
    """Fail if a count in a config (layers, labels, ...), also in inner settings, exceeds MAX_COUNT.

    transformers would take minutes to build such a config.
    """
    for name, values in settings.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                check_counts(label, value)
            elif isinstance(value, (int, float)) and value > MAX_COUNT and re.search(COUNT_NAMES, name):
                fail(f"{label}: config.json has {name} {value}; expected at most {MAX_COUNT:,}")


def check_size(label, config, build, folder):
    """Fail if a config describes a model that is larger than its weight files, or than this machine's memory.

    build    builds the model; called on the meta device, which allocates no memory, and stopped as soon as
             the model is too large
    folder   folder with the weight files; None: they are on the hub, and their sizes are not known yet
    """
    files = [path.stat().st_size for path in folder.iterdir()
             if path.suffix in (".safetensors", ".bin")] if folder else []
    # a half-precision weight has 2 bytes; tied weights are stored once but counted twice; a head may be new
    max_weights = 2 * sum(files) + 2**22 if folder else math.inf
    max_parts = 20_000 + sum(files) // 1000 if folder else MAX_COUNT
    found = Counter()

    def count(_, __, part):
        """PyTorch calls this for each parameter, buffer and module that is added to a module."""
        found["parts"] += 1
        kind = "weights" if isinstance(part, torch.nn.Parameter) else "buffers"
        found[kind] += part.numel() if isinstance(part, torch.Tensor) else 0
        if found["parts"] > max_parts or found["weights"] > max_weights:
            size = f"{found['weights']:,} weights in {found['parts']:,} parts"
            message = f"{label}: its config.json describes a model of more than {size}"
            if folder:
                message += (f", but its weight files have {sum(files):,} bytes; expected the config.json of "
                            "these weights")
            fail(message)
        check_memory(f"{label}: its config.json with {found['weights']:,} weights",
                     4 * found["weights"] + found["buffers"])

    hooks = [register(count) for register in (registration.register_module_parameter_registration_hook,
                                              registration.register_module_buffer_registration_hook,
                                              registration.register_module_module_registration_hook)]
    try:
        with torch.device("meta"), forbid_remote_code():
            build()
    finally:
        for hook in hooks:
            hook.remove()


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
