"""Nothing of size T x T, and no layer's activations beyond its end: every tensor that any operation returns is watched.

Axes: B sequences, T positions, E width.
"""

import gc
import weakref

import pytest
import torch
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from sinkscope.models.anatomy import anatomy_of
from sinkscope.tracing import hooks
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.receipt import check_reading
from sinkscope.tracing.trace import trace

LENGTH = 2048
# One family for each way in which attention is made: plain, soft-capped, learned sinks with windows, falcon's own call
# of scaled_dot_product_attention, latent attention whose values are shorter than its keys.
KINDS = ["llama", "gemma2", "gpt_oss", "falcon", "deepseek_v3"]


class LargestTensor(TorchDispatchMode):
    """Notes the shape of the largest tensor that any operation returns, and every one with two axes of T or more."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.num_elements = 0
        self.shape: tuple[int, ...] = ()
        self.squares: list[tuple[str, tuple[int, ...]]] = []
        self.num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.numel() > self.num_elements:
                self.num_elements, self.shape = tensor.numel(), tuple(tensor.shape)
            if sum(size >= self.length for size in tensor.shape) >= 2:
                self.squares.append((str(func), tuple(tensor.shape)))
        return result


def long_model(family: str, num_layers: int = 2, **overrides):
    if family != "falcon":
        overrides["max_position_embeddings"] = 4096
    return tiny_model(family, num_hidden_layers=num_layers, **overrides)


def tokens(length: int = LENGTH, num_sequences: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (num_sequences, length), generator=torch.Generator().manual_seed(0))


def watched_trace(model, ids, **options) -> LargestTensor:
    with LargestTensor(ids.shape[1]) as watch:
        trace(model, ids, **options)
    return watch


@pytest.mark.parametrize("family", KINDS)
def test_no_tensor_is_a_square(family):
    watch = watched_trace(long_model(family), tokens())
    assert watch.squares == []
    assert watch.num_elements <= LENGTH * LENGTH // 2, watch.shape
    assert watch.num_operations > 100


@pytest.mark.parametrize("num_layers", [1, 3])
def test_no_tensor_is_a_square_whatever_the_depth(num_layers):
    watch = watched_trace(long_model("llama", num_layers), tokens())
    assert watch.squares == []
    assert watch.num_elements <= LENGTH * LENGTH // 2, watch.shape


@pytest.mark.parametrize("family", KINDS)
def test_chosen_keys_need_no_square_either(family):
    watch = watched_trace(long_model(family), tokens(), keys=[0, 10])
    assert watch.squares == []
    assert watch.num_elements <= LENGTH * LENGTH // 2, watch.shape


def test_the_largest_tensor_grows_with_the_length_not_its_square():
    """Tiles of scores keep their size until one query tile of one head outgrows it."""
    short, long = (watched_trace(long_model("llama", 1), tokens(length)) for length in (LENGTH // 2, 2 * LENGTH))
    assert long.squares == []
    assert long.num_elements <= 4 * short.num_elements


def test_what_is_found_needs_no_square():
    result = trace(long_model("llama"), tokens(num_sequences=2))
    with LargestTensor(LENGTH) as watch:
        assert result.summary["num_layers"] == 2
        assert result.tables["positions"]["layer"] is not None
    assert watch.squares == []


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "falcon"])
def test_control_eager_attention_makes_squares(family):
    model, ids = long_model(family), tokens()
    if family == "falcon":
        model.config._attn_implementation = "eager"
    else:
        model.set_attn_implementation("eager")
    with LargestTensor(LENGTH) as watch, torch.no_grad():
        model(ids, use_cache=False)
    assert watch.squares
    assert watch.num_elements >= LENGTH * LENGTH


def test_control_a_square_made_by_the_reader_would_show(monkeypatch):
    read = hooks.read_attention

    def read_with_square(query, key, *rest):
        torch.matmul(query, key.repeat_interleave(2, dim=1).transpose(2, 3))
        return read(query, key, *rest)

    monkeypatch.setattr(hooks, "read_attention", read_with_square)
    assert watched_trace(long_model("llama"), tokens()).squares


# What stays alive from one layer to the next


class WatchedNeurons(LayerNeurons):
    """Layer neurons that can be found again."""

    made: weakref.WeakSet

    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.made.add(self)


@pytest.mark.parametrize("family", [*KINDS, "olmo2", "gpt2"])
def test_neurons_hold_nothing_once_their_layer_has_ended(family, monkeypatch):
    monkeypatch.setattr(WatchedNeurons, "made", weakref.WeakSet(), raising=False)
    monkeypatch.setattr(hooks, "LayerNeurons", WatchedNeurons)
    model, ids = long_model(family, 3), tokens(64, 2)
    anatomy = anatomy_of(model)
    held_inside, held_between = [], []

    def held() -> int:
        return sum(
            value is not None
            for neurons in WatchedNeurons.made
            for name, value in vars(neurons).items()
            if name != "layer"
        )

    handles = []
    for layer in anatomy.layers:
        handles.append(layer.block.register_forward_pre_hook(lambda *_: held_between.append(held())))
        # The last thing inside a layer that holds neurons: the projection that they enter.
        inner = layer.down_projection if layer.down_projection is not None else layer.experts
        handles.append(inner.register_forward_hook(lambda *_: held_inside.append(held())))
    trace(model, ids)
    for handle in handles:
        handle.remove()
    assert set(held_between) == {0}
    assert min(held_inside[-3:]) > 0  # control: inside a layer there is something to hold


def bytes_alive() -> int:
    """Bytes of all tensors that are alive and not frozen, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def growth_per_layer(model, ids, run) -> float:
    """How many more bytes are alive at each further layer's beginning."""
    alive = []
    handles = [
        layer.block.register_forward_pre_hook(lambda *_: alive.append(bytes_alive()))
        for layer in anatomy_of(model).layers
    ]
    check_reading(model, anatomy_of(model))
    alive.clear()  # the short passes of the receipt
    gc.collect()
    gc.freeze()  # what is there already, the model and this process's modules, is not looked at again
    try:
        run(model, ids)
    finally:
        gc.unfreeze()
        for handle in handles:
            handle.remove()
    return (alive[-1] - alive[1]) / (len(alive) - 2)


def plain(model, ids) -> None:
    with torch.no_grad():
        model(ids, use_cache=False)


def traced(model, ids) -> None:
    trace(model, ids, effective_rank=False)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "falcon", "deepseek_v3"])
def test_what_a_layer_leaves_behind_is_a_part_of_its_residual_stream(family):
    """One sequence: vectors over positions and neurons, rows of a few positions and queries, nothing of size T x E."""
    model, ids = long_model(family, 5, hidden_size=192), tokens()
    width = model.config.hidden_size
    residual = LENGTH * width * 4
    assert growth_per_layer(model, ids, plain) == 0
    assert growth_per_layer(model, ids, traced) < residual
    # Control: a reader that keeps one activation of each layer is seen.
    kept = []
    last = anatomy_of(model).layers

    def keep_residual(model, ids):
        handles = [layer.block.register_forward_hook(lambda _, args, out: kept.append(out)) for layer in last]
        plain(model, ids)
        for handle in handles:
            handle.remove()

    assert growth_per_layer(model, ids, keep_residual) >= residual


def test_what_several_sequences_leave_behind_does_not_grow_with_their_number():
    model = long_model("llama", 5, hidden_size=192)
    few, many = (growth_per_layer(model, tokens(256, number), traced) for number in (8, 24))
    assert many < 1.05 * few


def test_several_sequences_in_one_chunk_leave_no_activation_behind():
    model = long_model("llama", 5, hidden_size=192)
    assert growth_per_layer(model, tokens(num_sequences=2), traced) < LENGTH * model.config.hidden_size * 4
