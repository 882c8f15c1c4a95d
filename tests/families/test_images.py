"""Vision-language models: their language model is read on text, and on text with an image, as its owner's pass runs it.

The models are built tiny from configurations. What is read is compared with the model's own eager attention in the
same pass, so positions in three dimensions and masks are those of the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import roughen
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import sinkscope
from sinkscope.errors import InputError
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loading import load
from sinkscope.tracing.attention_hook import CausalMask
from sinkscope.tracing.block_states import besides, entering
from sinkscope.tracing.lock import making_keys
from sinkscope.tracing.trace import trace

IMAGE, LENGTH, AT = 98, 40, 4
TEXT = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    head_dim=8,
)
EYE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
IN_THREE_DIMENSIONS = dict(TEXT, rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=10000.0))
QWEN_EYE = dict(depth=2, hidden_size=16, out_hidden_size=32, intermediate_size=24, num_heads=2, patch_size=4)
MARKS = dict(image_token_id=IMAGE, vision_start_token_id=96, vision_end_token_id=95, video_token_id=97)
LLAMA = dict(model_type="llama", **TEXT)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llava": dict(text_config=LLAMA, vision_config=dict(EYE, model_type="clip_vision_model", projection_dim=16)),
    "qwen2_vl": dict(
        text_config=IN_THREE_DIMENSIONS,
        vision_config=dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2),
    ),
    "qwen2_5_vl": dict(
        text_config=IN_THREE_DIMENSIONS, vision_config=dict(QWEN_EYE, window_size=16, fullatt_block_indexes=[1])
    ),
    "qwen3_vl": dict(
        text_config=IN_THREE_DIMENSIONS,
        vision_config=dict(QWEN_EYE, num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
    "gemma3": dict(
        text_config=dict(TEXT, sliding_window=8, query_pre_attn_scalar=8), vision_config=EYE, mm_tokens_per_image=4
    ),
    "paligemma": dict(
        text_config=dict(model_type="gemma", **TEXT),
        vision_config=dict(EYE, model_type="siglip_vision_model", projection_dim=32),
        projection_dim=32,
    ),
    "idefics3": dict(text_config=LLAMA, vision_config=EYE, scale_factor=2),
    "smolvlm": dict(text_config=LLAMA, vision_config=EYE, scale_factor=2),
    "internvl": dict(
        text_config=dict(model_type="qwen2", **TEXT),
        vision_config=dict(EYE, image_size=[8, 8], patch_size=[4, 4]),
        downsample_ratio=0.5,
    ),
    "mllama": dict(
        text_config=dict(TEXT, cross_attention_layers=[1], bos_token_id=1, eos_token_id=2),
        vision_config=dict(EYE, attention_heads=2, num_global_layers=1, vision_output_dim=32),
    ),
}
READ = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "internvl")
REFUSED = {
    "gemma3": "image tokens that see one another",
    "paligemma": "attention in both directions",
    "mllama": "runs 0 times in a pass",
}
"""What cannot be read of a text with an image, and why; gemma3 is read on text alone."""
ONE_TOKEN = ("idefics3", "smolvlm", "internvl")
"""Those that make one token of the tiny image; the others make four."""


def tiny(name: str) -> PreTrainedModel:
    index = {"image_token_index": IMAGE} | ({} if name == "mllama" else MARKS)
    config = AutoConfig.for_model(name, **CONFIGURATIONS[name], **index)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        roughen(model.get_decoder(), 8)
    return model


def with_image(name: str) -> dict[str, Tensor]:
    """What the model's processor would return for a text with one image."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (1, LENGTH), generator=generator)
    count = 1 if name in ONE_TOKEN else 4
    ids[0, AT : AT + count] = IMAGE
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "qwen" in name:
        ids[0, AT - 1] = 96
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        grid = torch.tensor([[1, 4, 4]])
        return given | dict(pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE).int())
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    if name in ("gemma3", "paligemma"):
        given["token_type_ids"] = (ids == IMAGE).long()
    return given | {"pixel_values": pixels[None] if name in ("idefics3", "smolvlm") else pixels}


@pytest.mark.parametrize("name", READ)
def test_a_text_with_an_image_is_read_as_the_model_runs_it(name):
    model, given = tiny(name), with_image(name)
    result = trace(model, given)
    received_LHS = torch.as_tensor(result.recording["received"]).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**given, output_attentions=True, use_cache=False).attentions
    queries = LENGTH - torch.arange(LENGTH).double()
    expected_LHS = torch.stack([attention.double()[0].sum(1) / queries for attention in attentions])
    torch.testing.assert_close(received_LHS, expected_LHS, rtol=1e-4, atol=1e-6)
    # Control: without its image the text is another.
    alone = trace(model, given["input_ids"]).recording["received"]
    assert (torch.as_tensor(alone).double() - expected_LHS).abs().max() > 1e-4


def test_tokens_of_an_image_are_named_and_told_apart(tmp_path):
    result = trace(tiny("qwen2_5_vl"), with_image("qwen2_5_vl"))
    tokens = result.tables["tokens"]
    assert list(tokens["text"][AT : AT + 4]) == ["<image_0>", "<image_1>", "<image_2>", "<image_3>"]
    assert list(tokens["id"][AT : AT + 4]) == [-1, -2, -3, -4]
    assert result.summary["tokens"]["image_tokens"] == 4
    assert result.sequences is not None
    assert result.sequences.ids[0][AT : AT + 4].tolist() == [-1, -2, -3, -4]
    result.save(tmp_path / "run")
    saved = sinkscope.load_result(tmp_path / "run")
    saved.report(tmp_path / "page.html")
    assert "image_2" in (tmp_path / "page.html").read_text()
    assert saved.tables["tokens"]["text"][AT] == "<image_0>"


def test_an_intervention_acts_on_a_pass_with_an_image():
    model, given = tiny("llava"), with_image("llava")
    before = trace(model, given).recording["largest_write"][1]
    neuron = (1, int(trace(model, given).recording["largest_write_neuron"][1, AT]))
    with ablate_neurons(model, [neuron], "zero"):
        after = trace(model, given).recording["largest_write"][1]
    assert after[AT] < before[AT]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_reason(name):
    with pytest.raises(InputError, match=REFUSED[name]):
        trace(tiny(name), with_image(name))


def test_gemma3_is_read_on_text_alone():
    assert trace(tiny("gemma3"), with_image("gemma3")["input_ids"].clamp(max=90)).recording.anatomy.family


def test_keys_of_some_positions_are_rotated_as_in_three_dimensions():
    """What the lock reads: the keys that a layer makes of some states are those of the whole text there."""
    model, kept = tiny("qwen2_5_vl"), []
    anatomy, ids = anatomy_of(model), torch.arange(3, 75).view(3, 24)
    layer, some = anatomy.layers[1], torch.tensor([0, 5, 17])

    def keep(module, args, kwargs) -> None:
        kept.append((entering(args, kwargs), besides(args, kwargs)))

    handle = layer.attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    ((state_BTE, (args, kwargs)),) = kept
    call = args, kwargs | {"attention_mask": CausalMask(None)}
    with torch.no_grad(), making_keys(anatomy) as key_of:
        every_BKTD = key_of(layer, state_BTE, call, torch.arange(24), 24)
        some_BKQD = key_of(layer, state_BTE[:2, some], call, some, 24)
    torch.testing.assert_close(some_BKQD, every_BKTD[:2, :, some])


def test_a_model_that_reads_images_is_not_rotated():
    with pytest.raises(InputError, match="image features are written into it"):
        sinkscope.rotate(tiny("llava"))


def test_a_saved_folder_is_loaded_with_its_eye(tmp_path):
    model = tiny("llava")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert type(loaded.model) is type(model)
    expected, received = (trace(each, with_image("llava")).recording["received"] for each in (model, loaded))
    assert torch.equal(torch.as_tensor(expected), torch.as_tensor(received))


def test_images_that_would_not_be_read_are_refused():
    model, given = tiny("llava"), with_image("llava")
    with pytest.raises(InputError, match="no image tokens among the ids"):
        trace(model, given | {"input_ids": given["input_ids"].clamp(max=90)})
    with pytest.raises(InputError, match="does not read `image_grid_thw`"):
        trace(model, given | {"image_grid_thw": torch.tensor([[1, 4, 4]])})
    with pytest.raises(InputError, match="one length, without padding"):
        mask = given["attention_mask"].clone()
        mask[0, -1] = 0
        trace(model, given | {"attention_mask": mask})
    with pytest.raises(InputError, match="`pixel_values` beside `input_ids` is not read"):
        sinkscope.sink_tokens(model, given)
