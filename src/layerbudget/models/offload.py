"""Models whose weights stay in their files: mapped into memory, never copied, brought to a device one layer at a time.

The tensors of a safetensors checkpoint are mapped privately and given to transformers as a state dict, so names, tied weights
and conversions are its own. On a CPU in the checkpoint's precision the parameters *are* the mapped pages: nothing is
anonymous memory, the system drops and re-reads pages as it likes. In another precision, or on another device, each layer is
converted when its forward begins and dropped for the following one; for another device a thread converts the next one
meanwhile. On a CPU so is the head, and an embedding stays as it is stored: what it looks up is converted. What a treatment
writes into a layer is kept in a file, which is mapped in turn (:meth:`Mapped.remap`). Tensors that transformers makes of
several stored ones (the experts of a layer) lie in files without names, beside other temporary files.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CoverageError
from ..storage.checkpoint import broken
from ..storage.writing import check_space
from .blocks import layer_lists
from .machine import let_go, zeros_in_file

_KNOWN: weakref.WeakKeyDictionary[nn.Module, Mapped] = weakref.WeakKeyDictionary()


def mapped(model: nn.Module) -> Mapped | None:
    """The files behind a model's weights, or None where they are held in memory."""
    return _KNOWN.get(model)


def converting(model: nn.Module) -> bool:
    """Whether layers come to the device one at a time, so that a graph of the whole model cannot be kept."""
    files = mapped(model)
    return files is not None and files.converts


def need_settled(model: nn.Module, what: str) -> None:
    """Refuse a model whose layers come and go, for work that writes trials into its weights."""
    if converting(model):
        raise CoverageError(
            f"Layers come one at a time and are dropped again, and with them what {what} writes into them.",
            "Weights that are mapped as they are (a CPU, the checkpoint's own precision) keep it.",
            "Use --dtype auto --device cpu, or --no-stream.",
        )


def _tensors(file: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a file, all or some, as views of a new mapping of it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as handle:
            return {name: handle.get_tensor(name) for name in (handle.keys() if names is None else names)}
    except (SafetensorError, OSError) as error:
        raise broken(file, "safetensors", error) from error


class Mapped:
    """Where the weights of a model made from mapped tensors lie, and which of its layers are at hand.

    ``places`` has file and name of these tensors by the address of their values, and as an attribute by the parameter's name.
    Layers compute in that precision on that device.
    """

    def __init__(
        self, model: nn.Module, places: Mapping[int, tuple[Path, str]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.dtype, self.device = weakref.ref(model), dtype, device
        self.parameters = dict(model.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.places = {name: places[p.data_ptr()] for name, p in self.parameters.items() if p.data_ptr() in places}
        self.layers = [(f"{name}.{i}", layer) for name, stack in layer_lists(model) for i, layer in enumerate(stack)]
        self._layer_names = [[f"{name}.{key}" for key, _ in layer.named_parameters()] for name, layer in self.layers]
        self._mapped: dict[str, torch.Tensor] = {}
        self._current, self._ahead_of = -1, -1
        self._ends: tuple[set[str], list[list[str]], dict[str, torch.Tensor]] = set(), [], {}
        self.arrived = 0  # how often something came
        self._ahead: concurrent.futures.Future[dict[str, torch.Tensor]] | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1)
        self._settle()
        _KNOWN[model] = self

    def _settle(self) -> None:
        """Bring what lies outside the layers to the device; let the layers come when they run."""
        parameters = [self.parameters[name] for names in self._layer_names for name in names]
        elsewhere = self.device.type != "cpu"
        self.converts = elsewhere or any(p.is_floating_point() and p.dtype != self.dtype for p in parameters)
        comes, model, self._resting = [layer for _, layer in self.layers], self.model(), set[str]()
        if model is not None and self.converts and not elsewhere:
            comes += self._rest(model)
        self._inside = {name for names in self._layer_names for name in names}
        for name, p in self.parameters.items():
            if name not in self._inside | self._resting:
                p.data = self.computed(p)
        for _, buffer in model.named_buffers() if model is not None else ():
            buffer.data = buffer.data.to(self.device)
        if self.converts:
            for index, layer in enumerate(comes):
                layer.register_forward_pre_hook(lambda module, inputs, i=index: self._arrive(module, i))

    def _rest(self, model: Any) -> list[nn.Module]:
        """Let both ends stay as they are stored where that is no change; return the head where it comes as the layers do."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        plain = type(embedding) is nn.Embedding  # others compute with what they look up
        if plain:
            embedding.register_forward_hook(lambda module, inputs, output: output.to(self.dtype))
            self._resting = {self.names[id(embedding.weight)]}
        if type(head) is not nn.Linear or (head.weight is embedding.weight and not plain):
            return []
        self._layer_names.append([self.names[id(p)] for p in head.parameters()])
        return [head]

    def hold_ends(self) -> None:
        """Have embedding and head in the precision that layers compute in from now on, so that what is written there stays.

        On a CPU a copy in another precision lies in a file without a name.
        """
        self.leave()
        heads = self._layer_names[len(self.layers) :]
        ends = {*self._resting, *(name for names in heads for name in names)}
        self._ends = self._resting, heads, {name: self.parameters[name].data for name in ends}
        del self._layer_names[len(self.layers) :]
        self._resting, self._inside = set(), self._inside - ends
        for name in ends:
            self.parameters[name].data = self._aside(self.parameters[name])

    def _aside(self, parameter: nn.Parameter) -> torch.Tensor:
        """See :meth:`computed`, for a parameter that stays through a whole run and is read at its ends alone."""
        if self.device.type != "cpu" or parameter.dtype == self.dtype or not parameter.is_floating_point():
            return self.computed(parameter)
        folder = tempfile.gettempdir()
        check_space({folder: parameter.numel() * self.dtype.itemsize})
        copy = zeros_in_file(parameter.shape, folder, self.dtype).copy_(parameter.data)
        self._let_go(self.names.get(id(parameter), ""), parameter.data, copy)
        return copy

    def let_ends_go(self) -> None:
        """Let embedding and head leave the memory where :meth:`hold_ends` put them into files, until they are read."""
        for name in self._ends[2]:
            let_go(self.parameters[name].data)

    def rest_ends(self) -> None:
        """Undo :meth:`hold_ends`: what lies outside the layers is as its files have it, and what was written there is gone."""
        self.leave()
        self._resting, heads, stored = self._ends
        self._layer_names += heads
        self._inside |= {name for names in heads for name in names}
        for name, tensor in stored.items():
            self.parameters[name].data = tensor
        if not self.converts:
            self.fresh([name for name in self.places if name not in self._inside])

    def _arrive(self, layer: nn.Module, index: int) -> None:
        if index < len(self._layer_names) and not getattr(layer.forward, "skips", False):
            self._bring(index)

    def bring(self, name: str) -> None:
        """Have the layer of that full name at hand without running it, in the precision and place where layers compute."""
        if self.converts:
            self._bring([n for n, _ in self.layers].index(name))

    def _bring(self, index: int) -> None:
        if index == self._current:
            return
        step = index - self._current if abs(index - self._current) == 1 else 1
        self.leave()
        ready = self._ahead.result() if self._ahead is not None and self._ahead_of == index else self._convert(index)
        for name in self._layer_names[index]:
            self._mapped[name] = self.parameters[name].data
            self.parameters[name].data = ready[name]
        self._current, self._ahead, self._ahead_of = index, None, index + step
        self.arrived += 1
        if self.device.type != "cpu" and 0 <= index + step < len(self.layers):  # there a second layer is memory that counts
            self._ahead = self._worker.submit(self._convert, index + step)

    def _convert(self, index: int) -> dict[str, torch.Tensor]:
        ready = dict[str, torch.Tensor]()
        for name in self._layer_names[index]:
            ready[name] = self.computed(self.parameters[name])
            self._let_go(name, self.parameters[name].data, ready[name])
        return ready

    def _let_go(self, name: str, stored: torch.Tensor, used: torch.Tensor) -> None:
        """Let what was read of a mapped tensor leave the process, where a copy of it is used and it stays as it is."""
        if name in self.places and used.data_ptr() != stored.data_ptr():
            let_go(stored, private=True)

    @contextlib.contextmanager
    def remembered(self) -> Iterator[None]:
        """Inside, a graph remembers which weights of a layer that comes it needs, and not their values.

        The layer has to be at hand when the graph is run backwards: see :meth:`bring`.
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[str, torch.Size, tuple[int, ...], int]:
            """Keep where a weight lies, or the values of anything else."""
            place = tensor.untyped_storage().data_ptr()
            for name in self._mapped:
                if self.parameters[name].data.untyped_storage().data_ptr() == place:
                    return name, tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return tensor.detach()

        def unpack(kept: torch.Tensor | tuple[str, torch.Size, tuple[int, ...], int]) -> torch.Tensor:
            """Give what was kept."""
            if isinstance(kept, torch.Tensor):
                return kept
            name, shape, stride, offset = kept
            return self.parameters[name].data.as_strided(shape, stride, offset)

        if not self.converts:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def comes(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is dropped again when its layer has run."""
        return self.converts and self.names.get(id(parameter)) in self._inside

    def at_hand(self, index: int) -> bool:
        """Whether a layer is on the device now."""
        return index == self._current

    def computed(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's values in the precision and on the device that its layer computes in."""
        return parameter.data.to(self.device, self.dtype if parameter.is_floating_point() else parameter.dtype)

    def leave(self) -> None:
        """Drop the layer that is at hand; its mapped weights take its place."""
        for name, tensor in self._mapped.items():
            self._let_go(name, tensor, self.parameters[name].data)  # it may have been read meanwhile
            self.parameters[name].data = tensor
        self._mapped, self._current = {}, -1

    def fresh(self, names: Sequence[str]) -> None:
        """Map parameters again: what was written into them is gone, and with it the memory that it took."""
        wanted = {name: self.places[name] for name in names if name in self.places}
        files = {file for file, _ in wanted.values()}
        tensors = {file: _tensors(file, [key for place, key in wanted.values() if place == file]) for file in files}
        for name, (file, key) in wanted.items():
            tensor = tensors[file][key]
            if name in self._mapped:
                self._mapped[name] = tensor
            else:
                self.parameters[name].data = tensor
                if name not in self._inside | self._resting:  # as it was settled
                    self.parameters[name].data = self.computed(self.parameters[name])

    def copied(self, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters that no file has as they are (experts that were stacked, say), with copies that lie in files of their own.

        Those are what :meth:`fresh` cannot map again where layers stay in their places.
        """
        folder = tempfile.gettempdir()
        several = {id(p): p for p in parameters if not self.converts and self.names[id(p)] not in self.places}.values()
        check_space({folder: sum(p.nbytes for p in several)})
        return [(p, zeros_in_file(p.shape, folder, p.dtype).copy_(p.data)) for p in several]

    def stored(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's values as they lie in the files, also while they are at hand in another precision."""
        return self._mapped.get(self.names.get(id(parameter), ""), parameter.data)

    def again(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A parameter as its file has it, in a mapping of its own; None where it is not mapped."""
        place = self.places.get(self.names.get(id(parameter), ""))
        return None if place is None else _tensors(place[0], [place[1]])[place[1]]

    def remap(self, keys: Mapping[str, nn.Parameter], file: Path) -> None:
        """Take parameters from the tensors of a file from now on: what was written into them leaves the memory."""
        self.leave()
        names = {self.names[id(p)]: key for key, p in keys.items() if id(p) in self.names}
        left = {self.places[name][0] for name in names if name in self.places}
        self.places.update({name: (file, key) for name, key in names.items()})
        # a mapping, and what was written into it, lives as long as any tensor of its file does
        self.fresh([*names, *(name for name, (place, _) in self.places.items() if place in left and name not in names)])


def load_mapped(
    model_class: Any, config: Any, folder: Path | str, *, dtype: torch.dtype | None, device: torch.device
) -> tuple[nn.Module, Mapping[str, Any]]:
    """A model made from the safetensors files of a folder without copying them, and what transformers reports of its loading.

    Layers compute in ``dtype``, or where that is None in the type of most of the stored weights.
    """
    tensors: dict[str, torch.Tensor] = {}
    places: dict[int, tuple[Path, str]] = {}
    sizes: collections.Counter[torch.dtype] = collections.Counter()
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in _tensors(file).items():
            tensors[name], places[tensor.data_ptr()] = tensor, (file, name)
            sizes[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    stored = max(sizes, key=lambda kind: sizes[kind])
    mapping = getattr(model_class, "_model_mapping", None)
    chosen = model_class if mapping is None else mapping[type(config)]
    chosen = chosen[0] if isinstance(chosen, tuple | list) else chosen
    with _in_files(places):
        asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # the report has those of another shape
        model, report = chosen.from_pretrained(None, config=config, state_dict=tensors, dtype=stored, **asked)
    if dtype not in (None, stored):
        _buffers_of(chosen, config, model, dtype)
    _generation_of(model, folder)
    Mapped(model, places, dtype=dtype or stored, device=device)
    model.config.dtype = dtype or stored
    return model, report


def _generation_of(model: Any, folder: Path | str) -> None:
    """Give a model the settings of generation of its folder, which transformers reads only of a model that it loads itself."""
    from transformers import GenerationConfig

    if (Path(folder) / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)


@contextlib.contextmanager
def _in_files(places: Collection[int]) -> Iterator[None]:
    """Inside, a parameter that a module is given lies in a file of its own, unless its values have one of these addresses."""
    register, known = nn.Module.register_parameter, set(places)

    def spilled(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Copy the values into a file, and give the module these."""
        if parameter is not None and parameter.device.type == "cpu" and parameter.data_ptr() not in known:
            check_space({tempfile.gettempdir(): parameter.nbytes})
            parameter.data = zeros_in_file(parameter.shape, tempfile.gettempdir(), parameter.dtype).copy_(parameter.data)
            known.add(parameter.data_ptr())
        register(module, name, parameter)

    with _registering(spilled):
        yield


@contextlib.contextmanager
def _registering(way: Any) -> Iterator[None]:
    """Inside, modules take parameters in another way."""
    original = nn.Module.register_parameter
    nn.Module.register_parameter = way  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _buffers_of(model_class: Any, config: Any, model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model the buffers that it would have in another precision (embedding scales of Gemma are rounded to it)."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with _registering(without_memory):
        other = model_class._from_config(config, dtype=dtype)
    buffers = dict(model.named_buffers())
    for name, buffer in other.named_buffers():
        if buffer.is_floating_point() and buffer.device.type != "meta" and name in buffers:
            buffers[name].data = buffer.data
