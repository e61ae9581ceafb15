"""Save a predictor as `config.json` + `model.safetensors`, and load it back: never pickle.

The folder is written aside and renamed, so that a good one is never replaced by half of another.
"""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from neuboots._io import atomic_folder
from neuboots.head import has_lazy_layers, unwrap_model
from neuboots.methods._base import METHODS, find_predictor_class, find_saved_method
from neuboots.nets import build_net, describe_net
from neuboots.prediction import Predictor

FORMAT = "neuboots"
VERSION = 1


def save(predictor: Predictor, folder: str | os.PathLike[str]) -> None:
    """Write the predictor to a folder; an earlier save there is replaced as a whole."""
    from safetensors.torch import save_file

    if not isinstance(predictor, Predictor):
        raise ValueError(f"got a {type(predictor).__name__}; expected a predictor, as fit gives one")
    net = None if predictor.net is None else describe_net(predictor.net)
    config = {"format": FORMAT, "version": VERSION, **predictor.config(), "net": net}
    with atomic_folder(folder, ("config.json", "model.safetensors"), "a saved predictor") as aside:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in predictor.state_dict().items()}
        save_file(_unshared(tensors), aside / "model.safetensors")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one storage (tied weights): the second gets a copy."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if place in seen and place else tensor
        seen.add(place)
    return out


def load(folder: str | os.PathLike[str], *, model: nn.Module | None = None) -> Predictor:
    """Read a predictor. A net of `neuboots.nets` is rebuilt; for your own, give one of the same architecture.

    >>> import tempfile
    >>> from neuboots.methods import DeterministicPredictor
    >>> from neuboots.nets import MLP
    >>> folder = Path(tempfile.mkdtemp()) / "model"
    >>> save(DeterministicPredictor(MLP(4, 2)), folder)
    >>> load(folder).net.head
    Linear(in_features=500, out_features=2, bias=True)
    """
    source = Path(folder)
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"got net={model!r}; expected an nn.Module, such as MyNet()")
    config = _read_config(source)
    tensors = load_tensors(source / "model.safetensors")
    maker = find_predictor_class(config)
    if not find_saved_method(config).needs_net:
        if model is not None:
            raise ValueError(f"got a net for {config['method']!r}, which has none; expected load(folder) alone")
        model = nn.Module()
    elif model is None:
        if config["net"] is None:
            raise ValueError(
                f"{source} holds a net that is not one of neuboots.nets, so its architecture is not in the file: "
                "give a fresh net, load(folder, net=MyNet())"
            )
        model = build_net(config["net"])
    if has_lazy_layers(model):
        raise ValueError("got a net with lazy layers that have seen no input; expected known shapes: run it once first")
    try:
        predictor = maker.from_config(config, unwrap_model(model).eval())
    except (KeyError, TypeError, ValueError) as error:
        if maker.module is Predictor.module:  # the tensors are the net's own
            _fill(unwrap_model(model), tensors, source)  # weights that do not fit say more than options that do not
        raise ValueError(f"{source / 'config.json'} does not fit the net, or is damaged: {error}") from error
    _fill(predictor.module, tensors, source)
    return predictor


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; expected a folder written by neuboots.save") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); the file is damaged or foreign") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT or "net" not in config:
        raise ValueError(f"{path} is not a neuboots config; expected a folder written by neuboots.save")
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {config.get('version')}; expected {VERSION}: load it with the release that wrote it"
        )
    try:
        find_saved_method(config)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} names the method {config.get('method')!r}; expected one of {', '.join(METHODS)}: a method of "
            "your own is registered first"
        ) from None
    return config


def load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; expected it beside config.json") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors ({error}); it is truncated, damaged or foreign"
        ) from error


def _fill(net: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Load the tensors into the net, or say in one sentence what does not fit."""
    wanted = net.state_dict()
    missing = sorted(wanted.keys() - tensors.keys())
    extra = sorted(tensors.keys() - wanted.keys())
    shapes = [
        f"{name} {tuple(tensors[name].shape)} for {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    if missing or extra or shapes:
        parts = {"missing": missing, "not in the net": extra, "of another shape": shapes}
        said = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in parts.items() if names)
        raise ValueError(f"the weights in {source} do not fit the net ({said}): give the net they were saved from")
    # Loading into another precision would round in silence.
    precisions = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(precisions) == 1:
        net.to(dtype=precisions.pop())
    places = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    for name, place in places:
        if name in tensors and place.is_floating_point():
            place.data = place.data.to(tensors[name].dtype)
    net.load_state_dict(tensors)
