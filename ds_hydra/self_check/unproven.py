"""A model in; which of its parts nobody has proven to keep packed sequences apart, out.

Of torch's, transformers' and PEFT's own code it is known how tokens meet in it: by the attention interface, or the
model's class says that it is otherwise, and its layers are tried when the model is examined. Of a script's own code it
is not known, nor of an installed module that stands in a model of another class, such as a short convolution that a
script has put beside Llama's attention. The self-check tells; where it is off, packing alone is tried for such parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hydra.pipe.models.refusals import find_layers
from ds_hydra.pipe.models.whose_code import file_of, own_code
from ds_hydra.zero_hetero.errors import ConfigError

_TORCHS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict,
           nn.Sequential, nn.ParameterList, nn.ParameterDict)  # fmt: skip
_FOLDERS = tuple(
    str(Path(file_of(torch.nn.Module)).parent / name) for name in ("activation.py", "dropout.py", "container.py")
)  # of torch's modules that treat each number alone; attention among them does not
_APART = frozenset({"MultiheadAttention"})
_EVERYWHERE = ("activations.py", "pytorch_utils.py", "modeling_layers.py", "modeling_utils.py")  # of transformers


def unproven(model: Any) -> tuple[str, ...]:
    """Paths of modules, and names of hooks, that may let the tokens of a pack meet; none where nothing does."""
    of_layers = hasattr(model, "_layer_specs") or not hasattr(model, "config")  # such as an emulated model, of none
    return (*own_code(model), *(() if of_layers else _out_of_place(model)))


def _out_of_place(model: Any) -> Iterator[str]:
    """Modules in the layers that are neither the model's own kind nor known to treat each token alone."""
    try:
        path = find_layers(model)
    except ConfigError:  # which is told when the model is examined
        return
    homes = {str(Path(file_of(kind)).parent) for kind in type(model).__mro__ if file_of(kind)}
    for name, module in model.get_submodule(path).named_modules(prefix=path):
        kind = type(module)
        file = file_of(kind)
        if isinstance(module, _TORCHS) and kind.__module__.startswith("torch."):
            continue
        if file.startswith(_FOLDERS) and kind.__name__ not in _APART:
            continue
        if str(Path(file).parent) in homes or Path(file).name in _EVERYWHERE or "/peft/" in file:
            continue
        yield name
