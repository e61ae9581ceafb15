"""Split a net at its head, whatever its forward does: net = finish ∘ M ∘ F (paper, section 3.1).

    F(x) = what reaches the last layer M,   finish = what the net does with M's output

The net is left as it is. For one call a stand-in takes the head's place: it sees F(x), and it may scale it
or stop there. What follows the head (upsampling, wrapping in a dict) is noted down operation by operation
as it happens and can then be repeated on other outputs of the head, so that B replicates upsample B·C
outputs and never the D features.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from neuboots._replay import Recording, TracedTensor, as_plain_tensor

Head = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_SWAP = threading.RLock()  # a stand-in is seen by every thread that calls the net


def call_net(net: nn.Module, x: Any) -> Any:
    """net(x), with a mapping given as keywords (Hugging Face) and a tuple as positions."""
    if isinstance(x, Mapping):
        return net(**x)
    return net(*x) if isinstance(x, tuple | list) else net(x)


def cast_inputs(net: nn.Module, x: Any) -> Any:
    """x on the net's device, its floating-point tensors in the net's precision; tensors of other classes are plain."""
    like = next((p for p in net.parameters() if p.is_floating_point() and not is_lazy(p)), None)
    if like is None:
        return x
    if isinstance(x, Tensor):
        return _undressed(x).to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    if isinstance(x, Mapping):
        return {key: cast_inputs(net, value) for key, value in x.items()}
    if not isinstance(x, tuple | list):
        return x
    values = [cast_inputs(net, value) for value in x]
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)  # a named tuple takes them one by one


def _undressed(x: Tensor) -> Tensor:
    """x without a class that brings functions of its own (MONAI's MetaTensor, torchvision's tv_tensors).

    Such functions may differ from torch's in what they take. A class that lays out its data in another way, as torch's
    DTensor, stays.
    """
    dressed = type(x) is not Tensor and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    return as_plain_tensor(x) if dressed else x


def unwrap_model(net: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
            net = net.module
        elif isinstance(inner := getattr(net, "_orig_mod", None), nn.Module):
            net = inner
        else:
            return net


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module is in the mode it was in before."""
    training = [module for module in net.modules() if module.training]
    net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def extract_output(result: Any, x: Any = None) -> Tensor:
    """The tensor that counts in what a net returned: itself, its `.logits`, its "out" or "logits", or the only one.

    With the inputs x that it was returned for, a single row keeps its axis, which a net that squeezes takes away.

    >>> extract_output(torch.zeros(1, 3).squeeze(), torch.zeros(1, 5)).shape
    torch.Size([1, 3])
    """
    output = _only_tensor(result)
    return output[None] if _is_one_row(x) and output.shape[:1] != (1,) else output


def _is_one_row(x: Any) -> bool:
    """Whether all inputs have one row: a tensor, or those of a mapping or a tuple; one alone may serve many rows."""
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else (x,)
    return {len(part) for part in parts if isinstance(part, Tensor) and part.ndim} == {1}


def _only_tensor(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    if isinstance(logits := getattr(result, "logits", None), Tensor):
        return logits
    if isinstance(result, Mapping):
        for key in ("out", "logits"):
            if isinstance(result.get(key), Tensor):
                return cast(Tensor, result[key])
        found = {str(key): value for key, value in result.items() if isinstance(value, Tensor)}
    elif isinstance(result, Sequence):
        found = {str(i): value for i, value in enumerate(result) if isinstance(value, Tensor)}
    else:
        found = {}
    if len(found) == 1:
        return next(iter(found.values()))
    raise ValueError(
        f"the net returned a {type(result).__name__} with tensors {sorted(found)}; expected one tensor, "
        'a dict with "out" or "logits", or an object with .logits: wrap the net to return one of these'
    )


# -- finding the head ----------------------------------------------------------------------------------


def is_head(module: nn.Module) -> bool:
    """Whether the module is a plain Linear or 1×1 convolution: M(φ) = Wφ + b and nothing more."""
    kind = next((kind for kind in _FORWARDS if isinstance(module, kind)), None)
    if kind is None or kind.forward is not type(module).forward or is_lazy(cast(Tensor, module.weight)):
        return False
    if isinstance(module, nn.Linear):
        # the projection inside MultiheadAttention is a Linear whose forward is never called
        return not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    conv = cast(nn.Conv2d, module)
    whole = set(conv.kernel_size) == {1} and set(conv.stride) == {1} and conv.groups == 1
    return whole and conv.padding in ("valid", "same", (0,) * len(conv.kernel_size))


def make_head(weight: Tensor, bias: Tensor | None) -> Head:
    """A Linear or 1×1 convolution with these weights (copied), whatever parametrisation they came from."""
    outputs, width = weight.shape[:2]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.ndim - 3] if weight.ndim > 2 else None
    # on "meta" no first weights are drawn, so that the caller's random state stays as it is
    head: Head = nn.Linear(width, outputs, device="meta") if kind is None else kind(width, outputs, 1, device="meta")
    head.weight = nn.Parameter(weight.detach().clone())
    head.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return head


def find_head_candidates(net: nn.Module) -> list[str]:
    """Names of the layers that could be the head, in the order they were registered.

    >>> find_head_candidates(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    ['0', '2']
    """
    return [name for name, module in net.named_modules() if is_head(module)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[-8:])
    return f"{shown} (the last 8 of {len(names)})" if len(names) > 8 else shown


def find_head(net: nn.Module, *, example: Any = None) -> str:
    """The name of the last Linear or 1×1 convolution.

    With an example input it is the one whose output reaches the net's output past no other learned layer;
    without, the last layer with parameters that was registered. Where that does not decide, a sentence
    lists the candidates.
    """
    candidates = find_head_candidates(net)
    if not candidates:
        layers = [name or type(module).__name__ for name, module in net.named_modules() if _owns(module)]
        raise ValueError(
            f"the net has no Linear or 1×1 convolution that could be its head (layers with parameters: "
            f"{_listed(layers) or 'none'}); expected a net that ends in one: add a last layer"
        )
    if example is not None:
        return _find_by_running(net, candidates, example)
    last: str = [name for name, module in net.named_modules() if _owns(module)][-1]
    if last in candidates:
        return last
    raise ValueError(
        f"cannot tell which layer is the head: the last layer with parameters is {last!r}, and the candidates "
        f"are {_listed(candidates)}; name one (head=…), give an example input (example=x), or add a last layer"
    )


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _find_by_running(net: nn.Module, candidates: list[str], example: Any) -> str:
    tape = Recording(strict=False)
    calls = dict.fromkeys(candidates, 0)

    def traced(name: str) -> Callable[[Head, Tensor], Tensor]:
        def act(head: Head, phi: Tensor) -> Tensor:
            calls[name] += 1
            return tape.source(head(as_plain_tensor(phi)), name)

        return act

    stand_ins = {cast(Head, net.get_submodule(name)): traced(name) for name in candidates}
    with eval_mode(net), torch.no_grad(), eager_mode(net), _standing_in(net, stand_ins):
        output = extract_output(call_net(net, example))
    names, learned = tape.origins(output.slot) if isinstance(output, TracedTensor) else (set(), False)
    if len(names) == 1 and not learned:
        (name,) = names
        if calls[name] == 1:
            return name
        raise ValueError(_used(name, calls[name]))
    reach = sorted(names) or ["none"]
    why = "learned layers follow" if learned else f"those that reach the output directly: {_listed(reach)}"
    raise ValueError(
        f"cannot tell which layer is the head ({why}); the candidates are {_listed(candidates)}: name one (head=…), "
        "or add a last layer that is a Linear or 1×1 convolution"
    )


def _used(name: str, calls: int) -> str:
    times = "twice" if calls == 2 else f"{calls} times"
    return (
        f"the head {name!r} is used {times if calls else 'never'} in one pass; expected exactly once: "
        "name another layer (head=…), or give each use a layer of its own"
    )


# -- other layers in place of a net's own --------------------------------------------------------------


def _computed(net: nn.Module) -> dict[int, Tensor]:
    """Tensors that a layer computes and keeps beside its parameters (torch's older weight_norm): no copy knows them."""
    found = (value for module in net.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return {id(value): value.detach().clone() for value in found if not value.is_leaf}


def copy_net(net: nn.Module) -> nn.Module:
    """A copy of the net that shares nothing with it."""
    return copy.deepcopy(net, dict(_computed(net)))


def copy_to_meta(net: nn.Module) -> nn.Module:
    """A copy of the net without its numbers (on torch's meta device): its architecture, for no memory."""
    memo: dict[int, Any] = dict(_computed(net))
    for tensor in [*net.parameters(), *net.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(net, memo)


def replace_layers(
    net: nn.Module, kinds: tuple[type[nn.Module], ...], make: Callable[[nn.Module, str], nn.Module]
) -> dict[str, nn.Module]:
    """Put make(layer, name) in the place of every layer of these kinds, in place; the new layers by name.

    A layer that stands at several places gets one successor for all of them; where `make` gives the layer itself
    back, it stays. Layers with a forward of their own stay, and so do those that torch never calls.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> list(replace_layers(net, (nn.ReLU,), lambda layer, name: nn.Tanh())), net[1]
    (['1'], Tanh())
    """
    made: dict[nn.Module, nn.Module] = {}
    names: dict[str, nn.Module] = {}
    for path, parent in list(net.named_modules()):
        for key, child in list(parent._modules.items()):
            kind = next((kind for kind in kinds if isinstance(child, kind)), None)
            if child is None or kind is None or kind.forward is not type(child).forward:
                continue
            if isinstance(child, nn.modules.linear.NonDynamicallyQuantizableLinear):
                continue  # inside MultiheadAttention; its weights are read, its forward is never called
            name = f"{path}.{key}" if path else key
            if child not in made:
                made[child] = make(child, name)
                made[child].train(child.training)
                if made[child] is not child:
                    names[name] = made[child]
            parent._modules[key] = made[child]
    for module in net.modules():
        if not any(new in names.values() for new in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else torch's fast path reads the weights and never calls the layers
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False  # which belongs to the fast path
    return names


# -- the split -----------------------------------------------------------------------------------------


@contextmanager
def eager_mode(net: nn.Module) -> Iterator[None]:
    """Compiled parts of the net run as plain Python for a while: a compiler cannot look through a tape."""
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in net.modules())
    if not compiled:
        yield
        return
    if not hasattr(torch.compiler, "set_stance"):
        raise ValueError("parts of the net are compiled, which needs torch 2.6 or newer here: give the net uncompiled")
    with torch.compiler.set_stance("force_eager"):
        yield


class _StandIn(nn.Module):
    """Takes the head's place for one call; what the net asks of the head, the head answers."""

    def __init__(self, head: Head, act: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.act = head, act
        self.training = head.training

    def forward(self, phi: Tensor) -> Tensor:
        return self.act(self.head, phi)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("head"), name)


@contextmanager
def _standing_in(net: nn.Module, acts: Mapping[Head, Callable[[Head, Tensor], Tensor]]) -> Iterator[None]:
    with _SWAP:
        places = [
            (parent, key, child)
            for parent in list(net.modules())
            for key, child in parent._modules.items()
            if child in acts
        ]
        for parent, key, child in places:
            head = cast(Head, child)
            parent._modules[key] = _StandIn(head, acts[head])
        try:
            yield
        finally:
            for parent, key, child in places:
                parent._modules[key] = child


class _Stop(Exception):
    """Raised by the stand-in where nothing after the head is wanted."""


@dataclass(frozen=True)
class ForwardTrace:
    """One pass of the net: the features φ = F(x), the plain output, and what followed the head."""

    phi: Tensor
    output: Tensor
    tape: Recording
    slot: int

    @property
    def ends_at_head(self) -> bool:
        """Whether the output of the head is the output of the net, and nothing wrote into it on the way."""
        return self.slot == 0 and not self.tape.written

    def finish(self, z: Tensor) -> Tensor:
        """What the net does with its head's output z, repeated on a copy: it may write into it or view it flat."""
        return self.tape.repeat(z.clone(memory_format=torch.contiguous_format), self.slot)


@dataclass(frozen=True)
class HeadSplit:
    """net = finish ∘ head ∘ features."""

    net: nn.Module
    name: str
    head: Head  # kept, since a stand-in has its place while the net runs
    guessed: bool = False  # by the order of registration, and by nothing that ran

    @property
    def width(self) -> int:
        """D, the number of features that the head reads."""
        head = self.head
        return head.in_features if isinstance(head, nn.Linear) else head.in_channels

    @property
    def axis(self) -> int:
        """The axis of the features (and of the head's outputs): last for Linear, 1 for convolutions."""
        return -1 if isinstance(self.head, nn.Linear) else 1

    def run(self, x: Any, act: Callable[[Head, Tensor], Tensor]) -> Any:
        """The net with `act(head, φ)` in the place of head(φ)."""
        calls = 0

        def once(head: Head, phi: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ValueError(_used(self.name, calls))
            return act(head, phi)

        with _standing_in(self.net, {self.head: once}):
            result = call_net(self.net, x)
        if calls == 0:
            raise ValueError(_used(self.name, 0))
        return result

    def features(self, x: Any) -> Tensor:
        """φ = F(x); what the net does after its head is not computed."""
        seen: list[Tensor] = []

        def stop(head: Head, phi: Tensor) -> Tensor:
            seen.append(phi)
            raise _Stop

        try:
            self.run(x, stop)
        except _Stop:
            return seen[0]
        raise ValueError(_used(self.name, 0))

    def trace(self, x: Any) -> ForwardTrace:
        """One pass that notes what follows the head."""
        tape, seen = Recording(), []

        def note(head: Head, phi: Tensor) -> Tensor:
            seen.append(phi)
            if not phi.is_inference():
                tape.constants.append((phi, phi._version))
            return tape.source(head(phi), self.name)

        with eager_mode(self.net):
            output = extract_output(self.run(x, note), x)
        if not isinstance(output, TracedTensor):
            raise ValueError(
                f"the head {self.name!r} does not reach the net's output; the candidates are "
                f"{_listed(find_head_candidates(self.net))}: name another one (head=…)"
            )
        tape.check_constants()
        if self.guessed and tape.origins(output.slot)[1]:
            raise ValueError(
                f"the head was taken to be {self.name!r}, the last layer registered, but learned layers follow it; the "
                f"candidates are {_listed(find_head_candidates(self.net))}: name one (head=…) or give an example (example=x)"
            )
        return ForwardTrace(seen[0], as_plain_tensor(output), tape, output.slot)


def has_lazy_layers(net: nn.Module) -> bool:
    """Whether some layer still waits for a first input to know its shape."""
    return any(is_lazy(parameter) for parameter in net.parameters())


def initialize_lazy_layers(net: nn.Module, example: Any) -> None:
    """Lazy layers take their shapes from a first input; before that nobody knows D."""
    if not has_lazy_layers(net):
        return
    if example is None:
        raise ValueError("the net has lazy layers that have seen no input; expected known shapes: give example=x")
    with eval_mode(net), torch.no_grad():
        call_net(net, example)


def _check_bare(head: Head, name: str) -> None:
    """The product of B heads sees weights alone: whatever else changes the head's output would be lost."""
    own = {"WeightNorm", "SpectralNorm"}  # torch's older ones only set the weight
    hooks = [hook for hook in head._forward_pre_hooks.values() if type(hook).__name__ not in own]
    if head._forward_hooks or hooks or "forward" in vars(head):
        raise ValueError(
            f"the head {name!r} has hooks or a forward of its own; expected a plain layer, M(φ) = Wφ + b: remove them, "
            "or name another layer (head=…)"
        )


def split_head(net: nn.Module, name: str | None = None, *, example: Any = None) -> HeadSplit:
    """Split the net at its last Linear or 1×1 convolution, or at the layer called `name`.

    >>> split = split_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> split.name, split.width, split.features(torch.zeros(2, 4)).shape
    ('2', 8, torch.Size([2, 8]))
    """
    net = unwrap_model(net)
    initialize_lazy_layers(net, example)
    if is_head(net):
        net = nn.Sequential(net)  # a bare layer: its input is its features
        name = "0"
    guessed = name is None and example is None
    if name is None:
        name = find_head(net, example=example)
    candidates = find_head_candidates(net)
    if name not in candidates:
        raise ValueError(
            f"got head={name!r}; expected the name of a Linear or 1×1 convolution of the net: "
            f"{_listed(candidates) or 'there is none'}"
        )
    head = cast(Head, net.get_submodule(name))
    _check_bare(head, name)
    return HeadSplit(net, name, head, guessed)
