"""Model folders and hub names, opened with care: no code that lies in one is run, no size that its config
claims is believed before it was compared with its weight files, and every fault is one line."""
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

from .cli import Fault, afford, fail, is_out_of_memory, say
from .files import read_settings
from .output_dir import check_files


@contextlib.contextmanager
def blaming(named):
    """Whatever a foreign or damaged model makes of the block becomes one line that begins with its name."""
    try:
        yield
    except (Fault, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:                             # tokenizers' PanicException is no Exception
        text = str(error).strip()
        if is_out_of_memory(error):                            # cli.as_fault says what to do
            raise
        if "custom code" in text or "This code is timed out" in text:
            fail(f"{named}: wants to run Python that lies in it, which is never done; "
                 "wanted an architecture of transformers")
        if unknown := re.search(r"Unrecognized configuration class [\s\S]* kind of AutoModel: (\w+)", text):
            fail(f"{named}: transformers has no {unknown[1]} of its kind; take another model")
        fail(f"{named}: {type(error).__name__}: {' '.join(text.split())[:300]}")


def first_not_finite(model):
    """The name of the first weight or statistic that holds NaN or infinity, or None."""
    weights = model.state_dict()
    return next((name for name, weight in weights.items() if not weight.isfinite().all()), None)


def refuse_nan(named, model):
    """Refuses a model with a weight that is not finite."""
    if bad := first_not_finite(model):
        fail(f"{named}: {bad} holds NaN or infinity; wanted a checkpoint of a training that went well")


def own_memory(model):
    """Gives each weight memory of its own, as far as an optimizer needs it: tensors of a .bin may lie in each
    other's, or have one number in many places."""
    seen = set()
    for weight in model.parameters():
        memory = weight.untyped_storage()
        if memory.nbytes() != weight.nbytes or not weight.is_contiguous() or memory.data_ptr() in seen:
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)
        seen.add(weight.untyped_storage().data_ptr())


# ── config.json ─────────────────────────────────────────────────────────────────────────────────────────────

COUNTS = r"(^|_)(num|n|layers?|depths?|blocks?|groups?|experts?|labels)(_|$)"      # names of what is counted
MOST = 10**6                                                   # of them


def read_config(named, name, subfolder="", more=(), otherwise=""):
    """transformers' config of a folder or hub name, with `more` of its settings, and without those that name
    code to run. otherwise: what else a message offers where there is no such name."""
    if local := Path(name).is_dir():
        if not Path(name, subfolder, "config.json").is_file():
            fail(f"{named}: no config.json in this folder, so it is no transformers model")
        check_files(name, named)
        with blaming(named):
            check_counts(named, read_settings(Path(name, subfolder, "config.json")))
    else:
        say("hub", f"{name} is fetched, unless it is in the cache")
    try:
        with no_code():
            source = dict(subfolder=subfolder, trust_remote_code=False)
            config = AutoConfig.from_pretrained(name, **source, **dict(more))
    except Exception as error:
        if not local and "custom code" not in str(error):      # whatever the network makes of it
            fail(f"{named}: no such folder, and the hub does not give it; name a local folder{otherwise}")
        with blaming(named):
            raise
    with blaming(named):
        make_plain(config)
        if not all(isinstance(kind, str) for kind in config.architectures or []):
            fail(f"{named}: architectures of its config.json are no names; wanted a list of texts, or none")
        std = getattr(config, "initializer_range", getattr(config, "init_std", 0.02))
        if not 0 <= std < 100:
            fail(f"{named}: initializer_range of its config.json is {std}; wanted a deviation such as 0.02")
    return config


@contextlib.contextmanager
def no_code():
    """Within, transformers never asks whether code of a model may be run, and never runs any. Most of its
    functions take trust_remote_code=False, but models within models are made without it."""
    seconds, remote_code.TIME_OUT_REMOTE_CODE = remote_code.TIME_OUT_REMOTE_CODE, 0        # to answer in
    try:
        yield
    finally:
        remote_code.TIME_OUT_REMOTE_CODE = seconds


def make_plain(config):
    """Takes out of a config, and the configs in it, what names code, what adds outputs, and what computes the
    same outputs in another way."""
    vars(config).pop("auto_map", None)
    for setting, plain in {"_attn_implementation": None, "_experts_implementation": None,
                           "output_attentions": False, "output_hidden_states": False,
                           "chunk_size_feed_forward": 0}.items():
        if getattr(config, setting, plain) != plain:
            setattr(config, setting, plain)
    for part in list(vars(config).values()):
        for inner in part if isinstance(part, (list, tuple)) else [part]:
            if isinstance(inner, PreTrainedConfig):
                make_plain(inner)


def check_counts(named, settings):
    """Refuses numbers of layers, labels and the like, in settings within settings too, that would take the
    config itself minutes to make."""
    for name, values in settings.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                check_counts(named, value)
            elif isinstance(value, (int, float)) and value > MOST and re.search(COUNTS, name):
                fail(f"{named}: config.json has {name} {value}; wanted at most {MOST:,}")


def check_size(named, config, build, folder):
    """Refuses a config whose model is larger than the weight files beside it, or than the memory of this
    machine. build() makes the model; it is made on the meta device, which holds shapes alone, and no further
    than to where it is too large.

    folder   with the weight files; None: they are on the hub, whose sizes are not known yet
    """
    files = [path.stat().st_size for path in folder.iterdir()
             if path.suffix in (".safetensors", ".bin")] if folder else []
    # of half-precision weights, one tied to another counts twice; a head may be new
    most = 2 * sum(files) + 2**22 if folder else math.inf
    parts_most = 20_000 + sum(files) // 1000 if folder else MOST
    found = Counter()

    def count(_, __, part):
        """Called by PyTorch for each parameter, buffer and module that joins another."""
        found["parts"] += 1
        kind = "weights" if isinstance(part, torch.nn.Parameter) else "buffers"
        found[kind] += part.numel() if isinstance(part, torch.Tensor) else 0
        if found["parts"] > parts_most or found["weights"] > most:
            size = f"{found['weights']:,} weights in {found['parts']:,} parts"
            fail(f"{named}: its config.json describes a model of more than {size}, its weight files have "
                 f"{sum(files):,} bytes; wanted the config.json of these weights" if folder else
                 f"{named}: its config.json describes a model of more than {size}")
        afford(f"{named}: its config.json with {found['weights']:,} weights",
               4 * found["weights"] + found["buffers"])

    hooks = [register(count) for register in (registration.register_module_parameter_registration_hook,
                                              registration.register_module_buffer_registration_hook,
                                              registration.register_module_module_registration_hook)]
    try:
        with torch.device("meta"), no_code():
            build()
    finally:
        for hook in hooks:
            hook.remove()


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def find_file(name, file):
    """Path of a file in a folder or of a hub name; None: there is none."""
    if Path(name).is_dir():
        return path if (path := Path(name, file)).is_file() else None
    try:
        return Path(cached_file(name, file))
    except OSError:
        return None


def read_json(name, file):
    """The settings in a .json file of a folder or hub name; {} if there is no such file."""
    path = find_file(name, file)
    return read_settings(path) if path else {}
