"""What a model object may be like, crossed with what one can do with it: the numbers of the plain model, or a refusal.

A state is one entry of STATES: how a tiny model is brought into it, and what the receipt says of it. For each thing in
DOES the numbers must be those of the plain model, or the refusal must say why. Never other numbers.
"""

import asyncio
import contextlib
import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch import Tensor, nn

import sinkscope
from sinkscope import InputError
from sinkscope.fingerprints.signature import Inputs, sign
from sinkscope.interventions.base import Intervention, Place
from sinkscope.models.weights import weight_hash

IDS = torch.randint(10, 97, (3, 40), generator=torch.Generator().manual_seed(0))
CALIBRATION = torch.randint(10, 97, (64, 40), generator=torch.Generator().manual_seed(1))


# States


@contextlib.contextmanager
def plain(model) -> Iterator[Any]:
    yield model


@contextlib.contextmanager
def wrapped_by_compile(model):
    compiled = torch.compile(model, backend="eager")
    compiled(IDS)
    yield compiled


@contextlib.contextmanager
def compiled_in_place(model):
    model.compile(backend="eager")
    model(IDS)
    yield model


@contextlib.contextmanager
def compiled_by_block(model):
    for block in model.model.layers:
        block.compile(backend="eager")
    model(IDS)
    yield model


@contextlib.contextmanager
def offloaded_to_cpu(model):
    from accelerate import cpu_offload

    yield cpu_offload(model, execution_device=torch.device("cpu"))


@contextlib.contextmanager
def offloaded_to_disk(model, folder):
    from accelerate import disk_offload

    disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    yield model


@contextlib.contextmanager
def under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        yield model


@contextlib.contextmanager
def in_training_mode(model):
    model.train()
    yield model
    assert model.training


@contextlib.contextmanager
def with_hooks_of_its_owner(model):
    calls = []
    handle = model.model.layers[1].register_forward_hook(lambda *call: calls.append(1))
    yield model
    handle.remove()
    assert calls


@contextlib.contextmanager
def in_two_threads(model):
    """Another thread opens and closes an intervention first; what it did must be gone."""

    def other():
        with sinkscope.mask_to_self(model, 3):
            model(IDS)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    yield model


@contextlib.contextmanager
def copied_inside_an_intervention(model):
    with sinkscope.mask_to_self(model, 4), sinkscope.ablate_neurons(model, [(0, 1), (1, 2)]):
        changed = copy.deepcopy(model)
    yield changed


def adapted(model):
    config = peft.LoraConfig(target_modules=["down_proj", "o_proj", "q_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


@contextlib.contextmanager
def with_an_adapter(model):
    yield adapted(model)


@contextlib.contextmanager
def with_its_adapter_off(model):
    model = adapted(model)
    with model.disable_adapter():
        yield model


@contextlib.contextmanager
def beside_a_changed_one_of_its_configuration(model):
    """Models made from one configuration object share it, and its attention implementation with it."""
    other = type(model)(model.config).eval()
    assert other.config is model.config
    with sinkscope.mask_to_self(other, 10):
        yield model


@contextlib.contextmanager
def pickled_inside_an_intervention(model):
    with sinkscope.mask_to_self(model, 4), sinkscope.ablate_neurons(model, [(0, 1), (1, 2)]):
        content = pickle.dumps(model)
    yield pickle.loads(content)


@contextlib.contextmanager
def held_by_another_thread(model):
    opened, done = threading.Event(), threading.Event()

    def other():
        with sinkscope.mask_to_self(model, 3):
            opened.set()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait()
    yield model
    done.set()
    thread.join()


@contextlib.contextmanager
def held_by_another_task(model):
    held = sinkscope.mask_to_self(model, 3)

    async def other():
        held.__enter__()

    asyncio.run(other())
    yield model
    held.__exit__(None, None, None)


class Packed(nn.Module):
    """A projection whose weight is packed, two numbers of four bits a byte."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.shape = linear.weight.shape
        self.scale = linear.weight.detach().abs().max() / 7
        codes = (linear.weight.detach() / self.scale).round().to(torch.int8).flatten().add(8).byte()
        self.weight = nn.Parameter((codes[::2] | (codes[1::2] << 4))[:, None], requires_grad=False)

    def forward(self, x):
        codes = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten().float() - 8
        return x @ (codes * self.scale).view(self.shape).T


@contextlib.contextmanager
def quantised_by_packing(model):
    for block in model.model.layers:
        block.mlp.down_proj = Packed(block.mlp.down_proj)
    yield model


@contextlib.contextmanager
def quantised_by_torch(model):
    yield torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@contextlib.contextmanager
def with_a_block_used_twice(model):
    model.model.layers[2] = model.model.layers[1]
    yield model


@dataclass(frozen=True, kw_only=True)
class State:
    enter: Callable
    says: tuple[str, ...] = ()
    """What the receipt says of it."""
    tolerance: float = 1e-5
    is_like: Callable = lambda model: model
    """The plain model whose numbers it must give."""
    refused: str | None = None
    """Why nothing can be done with it; None where everything can."""
    though: tuple[str, ...] = ()
    """What can be done all the same, since it reads nothing but what the model gives back."""


STATES: dict[str, State] = {
    "plain": State(enter=plain),
    "wrapped by torch.compile": State(enter=wrapped_by_compile, says=("compiled",)),
    "compiled in place": State(enter=compiled_in_place, says=("compiled",)),
    "compiled block by block": State(enter=compiled_by_block, says=("compiled",)),
    "offloaded to the CPU": State(enter=offloaded_to_cpu, says=("offloaded",)),
    "offloaded to disk": State(enter=offloaded_to_disk, says=("offloaded",)),
    "under autocast": State(enter=under_autocast, says=("autocast",), tolerance=0.05),
    "in training mode": State(enter=in_training_mode),
    "with hooks of its owner": State(enter=with_hooks_of_its_owner),
    "after another thread": State(enter=in_two_threads),
    "copied inside an intervention": State(enter=copied_inside_an_intervention),
    "pickled inside an intervention": State(enter=pickled_inside_an_intervention),
    "sharing its configuration": State(enter=beside_a_changed_one_of_its_configuration),
    "adapted": State(
        enter=with_an_adapter,
        says=("adapted",),
        tolerance=1e-4,
        is_like=lambda model: adapted(model).merge_and_unload(),
    ),
    "adapted, the adapter off": State(enter=with_its_adapter_off, says=("adapted",)),
    "shared by two threads": State(enter=held_by_another_thread, refused="Another thread or task"),
    "shared by two tasks": State(enter=held_by_another_task, refused="Another thread or task"),
    "quantised by packing": State(enter=quantised_by_packing, refused="in full precision"),
    "quantised by torch": State(enter=quantised_by_torch, refused="in full precision", though=("sign",)),
    "with a block used twice": State(enter=with_a_block_used_twice, refused="Each must run once", though=("sign",)),
}


# What one can do: each gives a tensor


def traced(model) -> Tensor:
    return sinkscope.trace(model, IDS).recording["received"]


def probed(model) -> Tensor:
    found = sinkscope.probe(model, IDS)
    return torch.tensor([found.layers[name] for name in ("dom_ratio", "largest_residual")])


def logits_under(open_it: Callable) -> Callable:
    """The owner's own forward pass under an intervention, and a trace under it."""

    def do(model) -> Tensor:
        with open_it(model):
            with torch.no_grad():
                logits = model(IDS).logits
            received = sinkscope.trace(model, IDS).recording["received"]
        return torch.cat([logits.flatten().float(), received.flatten()])

    return do


def signed(model) -> Tensor:
    return sign(sinkscope.load(model), Inputs(vocabulary=97, num_sequences=64, length=8)).states


def intervened(model) -> Tensor:
    """A study of two conditions: what each changed, from the last layers to the first."""
    found = sinkscope.intervene(model, {"mask_to_self": 5, "ablate": "1:5"}, num_sequences=2, length=24)
    fired = {each["name"]: each["layers"] for each in found.summary["receipt"]["interventions"]}
    assert fired == {"mask_to_self": [0, 1, 2], "ablate_neurons": [1]}
    means = found.tables["means"]
    return torch.tensor([means["after"], means["control"]])


NEURONS = [(0, 3), (1, 5)]
DOES: dict[str, Callable] = {
    "trace": traced,
    "probe": probed,
    "sink_tokens": lambda model: sinkscope.sink_tokens(model, IDS).received,
    "mask_to_self": logits_under(lambda model: sinkscope.mask_to_self(model, 10)),
    "amplify_variance": logits_under(lambda m: sinkscope.amplify_variance(m, 10, 4.0, calibration=CALIBRATION)),
    "ablate_neurons": logits_under(lambda model: sinkscope.ablate_neurons(model, NEURONS)),
    "densify_neurons": logits_under(lambda model: sinkscope.densify_neurons(model, NEURONS)),
    "transplant_neurons": logits_under(lambda model: sinkscope.transplant_neurons(model, NEURONS, 0, 10)),
    "set_dimensions": logits_under(lambda model: sinkscope.set_dimensions(model, [7], positions=[5])),
    "clamp": logits_under(lambda model: sinkscope.clamp(model, IDS, neurons=NEURONS, positions=[5])),
    "sign": signed,
    "intervene": intervened,
}


@pytest.fixture(scope="module")
def expected() -> Callable[[Callable, str], Tensor]:
    """The numbers of a plain model, by what makes it and by what is done."""

    @functools.cache
    def numbers(is_like: Callable, what: str) -> Tensor:
        return DOES[what](is_like(tiny_model("llama")))

    return numbers


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", STATES)
def test_the_numbers_of_the_plain_model_or_a_refusal(name, expected, tmp_path):
    state, model = STATES[name], tiny_model("llama")
    arguments = (model, tmp_path) if name == "offloaded to disk" else (model,)
    with state.enter(*arguments) as prepared:
        for what, do in DOES.items():
            if state.refused is not None:
                if what not in state.though:
                    with pytest.raises(InputError, match=state.refused):
                        do(prepared)
                continue
            numbers = expected(state.is_like, what)
            apart = (do(prepared) - numbers).abs().max() / numbers.abs().max()
            assert float(apart) <= state.tolerance, what
        if state.refused is not None:
            return
        receipt = sinkscope.trace(prepared, IDS).summary["receipt"]
    assert receipt["states"] == state.says
    assert receipt["difference"] <= receipt["tolerance"]
    assert receipt["dtype"] == ("bfloat16" if "autocast" in state.says else "float32")


# Adapters


@pytest.mark.parametrize("what", DOES)
def test_control_the_adapter_changes_every_number(what, expected):
    on, off = (expected(STATES[name].is_like, what) for name in ("adapted", "adapted, the adapter off"))
    assert on.shape != off.shape or not torch.allclose(on, off, rtol=0, atol=1e-3 * float(off.abs().max()))


def test_an_adapter_whose_weight_is_not_what_it_multiplies_by_is_refused():
    model = tiny_model("llama")
    config = peft.LoraConfig(target_modules=["down_proj"], r=4, use_dora=True, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1.5)
    with pytest.raises(InputError, match="does not give its input times its weight"):
        sinkscope.trace(model, IDS)


# Models whose own pass is not the one that is read


def looks_ahead(model):
    model.model.layers[1].self_attn.is_causal = False


def other_forward(model):
    def forward(input_ids, **kwargs):
        return nn.Module.__call__(model.model, input_ids=input_ids.flip(1), **kwargs)

    model.forward = forward


class Doubling(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def linear_of_another_kind(model):
    before = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = Doubling(before.in_features, before.out_features, bias=False)


def block_used_twice(model):
    model.model.layers[2] = model.model.layers[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (looks_ahead, "end in different states"),
        (other_forward, "end in different states"),
        (linear_of_another_kind, "does not give its input times its weight"),
        (block_used_twice, "Each must run once"),
    ],
)
def test_a_model_that_is_not_what_would_be_read_is_refused(change, says):
    model = tiny_model("llama")
    neurons = sinkscope.sink_neurons(model, IDS)
    sinkscope.trace(model, IDS)  # also when it was compared before
    change(model)
    for what, do in DOES.items():
        if what != "sign":  # it reads what the model gives back
            with pytest.raises(InputError, match=says):
                do(model)
    with pytest.raises(InputError, match=says):
        sinkscope.sink_tokens(model, IDS, neurons=neurons)


def test_the_weight_hash_is_of_the_weights_as_they_are():
    loaded = sinkscope.load(tiny_model("llama"))
    before = sinkscope.trace(loaded, IDS).summary["receipt"]["weights"]
    assert before == loaded.weight_hash
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.down_proj.weight[3, 4] += 1
    assert sinkscope.trace(loaded, IDS).summary["receipt"]["weights"] != before


@pytest.mark.parametrize("place", [(slice(None), 3), (3, slice(None))])
def test_the_weight_hash_knows_of_a_row_or_column_that_was_changed_past_torch(place):
    """Changes through `.data` are not counted by torch; neurons and tokens are often taken out so."""
    loaded = sinkscope.load(tiny_model("llama"))
    before = sinkscope.trace(loaded, IDS).summary["receipt"]["weights"]
    loaded.model.model.layers[1].mlp.down_proj.weight.data[place] = 0
    assert sinkscope.trace(loaded, IDS).summary["receipt"]["weights"] != before
    with pytest.raises(InputError, match="the weights are"), sinkscope.mask_to_self(loaded, 10):
        loaded.model.model.layers[0].mlp.up_proj.weight.data[place] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_weight_hash_knows_of_any_one_value_that_was_changed_past_torch(dtype):
    """Also in weights that are not contiguous, that begin or end within eight bytes, or have no values."""
    module = nn.Module()
    module.transposed = nn.Parameter(torch.arange(35, dtype=dtype).view(5, 7).T)
    module.odd = nn.Parameter(torch.arange(7, dtype=dtype)[1:6])
    module.scalar = nn.Parameter(torch.ones((), dtype=dtype))
    module.empty = nn.Parameter(torch.ones(0, dtype=dtype))
    hashes = [weight_hash(module)]
    for parameter, place in [(module.transposed, (3, 4)), *((module.odd, n) for n in range(5)), (module.scalar, ())]:
        parameter.data[place] += 1
        hashes.append(weight_hash(module))
    assert len(set(hashes)) == len(hashes)
    assert weight_hash(module) == hashes[-1] == weight_hash(copy.deepcopy(module))


# Every intervention acts, and the model is left as it was


class Silent(Intervention):
    """Says that it acts in layer 1, and does not."""

    name = "silent"

    def __init__(self, model) -> None:
        super().__init__(model, Place(on="nothing", layers=(1,)))

    def opening(self, stack, acted) -> None:
        pass


class Staying(Intervention):
    """Leaves a hook behind."""

    name = "staying"

    def __init__(self, model) -> None:
        super().__init__(model, Place(on="nothing", layers=()))

    def opening(self, stack, acted) -> None:
        self.handle = self.anatomy.layers[1].block.register_forward_hook(lambda *call: None)


def test_an_intervention_that_does_not_act_is_refused_in_the_first_pass():
    model = tiny_model("llama")
    before = model(IDS).logits
    for run in (model, lambda ids: sinkscope.trace(model, ids)):
        with pytest.raises(InputError, match="silent did not act in layer 1"), Silent(model):
            run(IDS)
    assert torch.equal(model(IDS).logits, before)


def test_a_hook_that_stays_is_found():
    model = tiny_model("llama")
    staying = Staying(model)
    with pytest.raises(InputError, match=r"the hooks of layers\.1 are not as before"), staying:
        model(IDS)
    staying.handle.remove()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.model.layers[0].mlp.down_proj.weight.data.add_(1), "the weights are"),
        (lambda model: setattr(model.config, "rms_norm_eps", 1e-3), "the configuration"),
        (lambda model: model.set_attn_implementation("eager"), "the configuration, or the attention"),
    ],
)
def test_what_its_owner_changes_meanwhile_is_told(change, says):
    model = tiny_model("llama")
    with pytest.raises(InputError, match=says), sinkscope.mask_to_self(model, 10):
        change(model)
    with sinkscope.mask_to_self(model, 10):  # and it goes on from there
        pass


def test_a_model_may_be_trained_inside_an_intervention():
    model = tiny_model("llama").requires_grad_(True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with sinkscope.ablate_neurons(model, NEURONS):
        model(IDS, labels=IDS).loss.backward()
        optimiser.step()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_copies_made_inside_an_intervention_name_the_attention_of_their_owner(family, implementation):
    """Another process does not know the name that ours has meanwhile."""
    model = tiny_model(family, attn_implementation=implementation)
    with sinkscope.mask_to_self(model, 10):
        assert model.config._attn_implementation != "eager"
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model.config)):
            assert getattr(copied, "config", copied)._attn_implementation == implementation
            assert type(getattr(copied, "config", copied)._attn_implementation) is str
    assert type(model.config._attn_implementation) is str


def test_what_is_not_open_cannot_be_closed():
    mask = sinkscope.mask_to_self(tiny_model("llama"), 10)
    for _ in range(2):
        with pytest.raises(InputError, match="mask_to_self is not open"):
            mask.__exit__(None, None, None)
        with mask:
            pass


def test_a_model_may_be_saved_inside_an_intervention(tmp_path):
    """Saving notes its class and type in the configuration, which is no change of the model."""
    model = tiny_model("llama")
    with sinkscope.mask_to_self(model, 10):
        model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(sinkscope.load(tmp_path).model(IDS).logits, model(IDS).logits)


# Opened and closed in any order


MAKERS: list[Callable] = [
    lambda model: sinkscope.mask_to_self(model, 10),
    lambda model: sinkscope.mask_to_self(model, 5),
    lambda model: sinkscope.ablate_neurons(model, NEURONS),
    lambda model: sinkscope.set_dimensions(model, [7], positions=[5]),
]


@pytest.mark.parametrize("family", ["llama", "falcon"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.permutations([*range(len(MAKERS)), *range(len(MAKERS))]))
def test_interleavings_of_open_and_close(family, order):
    """Each number opens its intervention the first time it comes, and closes it the second time."""
    model = _cached_model(family)
    made: dict[int, Intervention] = {}
    for number in order:
        if number in made:
            made.pop(number).__exit__(None, None, None)
        else:
            made[number] = MAKERS[number](model)
            made[number].__enter__()
        assert torch.equal(_logits(model), _logits_with(family, frozenset(made)))


_models: dict[str, Any] = {}
_kept: dict[tuple[str, frozenset], Tensor] = {}


def _cached_model(family: str):
    if family not in _models:
        _models[family] = tiny_model(family, seed=0) if family == "llama" else tiny_model(family)
    return _models[family]


def _logits(model) -> Tensor:
    with torch.no_grad():
        return model(IDS[:1]).logits


def _logits_with(family: str, on: frozenset) -> Tensor:
    """What a fresh model gives with some of the interventions on, opened one after another."""
    if (family, on) not in _kept:
        model = copy.deepcopy(tiny_model(family))
        with contextlib.ExitStack() as stack:
            for number in sorted(on):
                stack.enter_context(MAKERS[number](model))
            _kept[family, on] = _logits(model)
    return _kept[family, on]


def test_models_of_one_configuration_open_and_close_in_any_order():
    first = tiny_model("llama")
    second = type(first)(first.config).eval()
    before = first.config._attn_implementation, _logits(first), _logits(second)
    one, two = sinkscope.mask_to_self(first, 10), sinkscope.mask_to_self(second, 5)
    one.__enter__(), two.__enter__()
    one.__exit__(None, None, None)
    assert torch.equal(_logits(first), before[1])
    assert not torch.equal(_logits(second), before[2])
    two.__exit__(None, None, None)
    assert first.config._attn_implementation == before[0]
    assert all(map(torch.equal, (_logits(first), _logits(second)), before[1:]))


def test_a_generator_may_close_late():
    model = tiny_model("llama")
    before = _logits(model)

    def masked(position):
        with sinkscope.mask_to_self(model, position):
            yield _logits(model)

    first, second = masked(10), masked(5)
    next(first), next(second)
    first.close()
    assert not torch.equal(_logits(model), before)
    second.close()
    assert torch.equal(_logits(model), before)


def test_overlapping_tasks():
    """A second task neither reads the changed model nor changes it too; when the first is done it may."""
    model = tiny_model("llama")
    before, refused = _logits(model), []

    async def first(opened: asyncio.Event, tried: asyncio.Event):
        with sinkscope.mask_to_self(model, 10):
            opened.set()
            await tried.wait()
            return sinkscope.trace(model, IDS).recording["received"]

    async def second(opened: asyncio.Event, tried: asyncio.Event):
        await opened.wait()
        for do in (lambda: sinkscope.trace(model, IDS), lambda: sinkscope.mask_to_self(model, 5).__enter__()):
            with pytest.raises(InputError, match="Another thread or task has mask_to_self open") as raised:
                do()
            refused.append(raised)
        tried.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        received, _ = await asyncio.gather(first(*events), second(*events))
        return received

    received = asyncio.run(both())
    assert len(refused) == 2
    with sinkscope.mask_to_self(model, 10):
        assert torch.equal(sinkscope.trace(model, IDS).recording["received"], received)
    assert torch.equal(_logits(model), before)


def test_another_thread_is_refused_while_an_intervention_is_open():
    model, raised = tiny_model("llama"), []

    def other():
        with pytest.raises(InputError, match="Another thread or task") as error:
            sinkscope.trace(model, IDS)
        raised.append(error)

    with sinkscope.ablate_neurons(model, NEURONS):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert raised
