"""Quantised checkpoints are dequantised as their makers meant, or refused; packed numbers never pass for weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from sinkscope.errors import InputError
from sinkscope.models.loading import load
from sinkscope.names import reference_run

BLOCK = 32


def packed(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the packed weight, the scale of each block, what both stand for)."""
    blocks = [part.split(BLOCK, dim=1) for part in weight.split(BLOCK)]
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = torch.stack([torch.stack([block.abs().max() / largest for block in row]) for row in blocks])
    spread = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    stored = (weight / spread).round().to(dtype) if dtype == torch.int8 else (weight / spread).to(dtype)
    return stored, scale, stored.float() * spread


def saved(folder: Path, dtype: torch.dtype, *, scales: str | None = "_scale_inv", **quantisation) -> dict:
    """reference:softmax with its projections in `dtype`, written to a folder; returns what its weights stand for."""
    shutil.copytree(reference_run("reference:softmax") / "model", folder)
    weights, meant = load_file(folder / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        meant[name] = weight
        if dtype.is_floating_point and dtype.itemsize > 1:
            weights[name] = weight.to(dtype)
        elif name.endswith("proj.weight"):
            weights[name], scale, meant[name] = packed(weight.float(), dtype)
            if scales:
                weights[f"{name}{scales}"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if quantisation:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return meant


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        load(folder, device="cpu")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_packed_weights_that_nothing_describes_are_refused(tmp_path, dtype):
    saved(tmp_path / "model", dtype)
    stored = "F8_E4M3" if dtype.is_floating_point else "I8"
    refused(
        tmp_path / "model", "quantization_config", "are packed", "the first is model.layers.0", stored, "full precision"
    )


def test_the_same_in_bfloat16_loads(tmp_path):
    """The control: a narrower dtype without scales stands for itself."""
    meant = saved(tmp_path / "model", torch.bfloat16)
    model = load(tmp_path / "model", device="cpu").model
    assert all(torch.equal(weight, meant[name].bfloat16().float()) for name, weight in model.named_parameters())


@pytest.mark.parametrize("method", ["modelopt", "nonsense"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_method_that_transformers_does_not_know_is_refused(tmp_path, method, dtype):
    saved(tmp_path / "model", dtype, quant_method=method)
    refused(tmp_path / "model", f"does not know the quantisation '{method}' of model")


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def test_fp8_is_what_its_scales_make_of_it(tmp_path):
    meant = saved(tmp_path / "model", torch.float8_e4m3fn, **FP8)
    model = load(tmp_path / "model", device="cpu").model
    for name, weight in model.named_parameters():
        # One product in float32; and what was not packed is in float32 as well, whatever it is on disk.
        torch.testing.assert_close(weight.detach(), meant[name].float(), rtol=1e-6, atol=0)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("scales", "found"),
    [(None, "F8_E4M3 without its scale"), ("_scale", "scales of quantised weights that nothing applies")],
)
def test_fp8_without_its_scales_is_refused(tmp_path, scales, found):
    saved(tmp_path / "model", torch.float8_e4m3fn, scales=scales, **FP8)
    refused(tmp_path / "model", found, "full precision")


MXFP4_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4_experts(folder: Path) -> dict:
    """A GPT-OSS with experts of random 4-bit numbers, 32 to a scale; returns what its weights stand for."""
    model = tiny_model("gpt_oss", hidden_size=64, intermediate_size=32)
    model.save_pretrained(folder)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    meant = dict(weights)
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        num_experts, width, outputs = weights.pop(name).shape
        numbers = torch.randint(16, (num_experts, outputs, width // BLOCK, BLOCK), generator=generator)
        scales = torch.randint(115, 125, numbers.shape[:3], generator=generator)
        weights[f"{name}_blocks"] = (numbers[..., 0::2] | numbers[..., 1::2] << 4).to(torch.uint8)
        weights[f"{name}_scales"] = scales.to(torch.uint8)
        values = torch.cat([MXFP4_NUMBERS, -MXFP4_NUMBERS])[numbers] * torch.exp2(scales - 127.0)[..., None]
        meant[name] = values.flatten(2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return meant


def test_mxfp4_is_what_its_scales_make_of_it(tmp_path):
    meant = mxfp4_experts(tmp_path / "model")
    model = load(tmp_path / "model", device="cpu").model
    assert all(torch.equal(weight, meant[name]) for name, weight in model.named_parameters())
    weights = load_file(tmp_path / "model" / "model.safetensors")
    few = {name: weight for name, weight in weights.items() if not name.endswith("_scales")}
    save_file(few, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "model", "cannot load the weights that config.json describes")


def test_scales_beside_full_weights_are_refused(tmp_path):
    saved(tmp_path / "model", torch.float32)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name in ("weight_scale", "input_scale", "qzeros"):
        stray = {f"model.layers.1.self_attn.q_proj.{name}": torch.ones(1)}
        save_file(weights | stray, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        refused(tmp_path / "model", "1 scales", f"q_proj.{name}")


@pytest.mark.parametrize(
    ("quantisation", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "gptqmodel"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
    ],
)
def test_a_missing_package_is_named(tmp_path, quantisation, package):
    saved(tmp_path / "model", torch.float32, **quantisation)
    refused(tmp_path / "model", package, "Install what its quantisation asks for")


@pytest.mark.parametrize("can_dequantise", [True, False])
def test_a_model_that_stays_packed_is_dequantised_by_its_own_method(tmp_path, monkeypatch, can_dequantise):
    class HalvingConfig(QuantizationConfigMixin):
        def __init__(self, **described):
            self.quant_method = "halving"

    class Halving(HfQuantizer):
        """Stands for bitsandbytes: the weights that it loads are half of what they stand for."""

        requires_calibration = False

        def _process_model_before_weight_loading(self, model, **options):
            pass

        def is_serializable(self):
            return True

        @property
        def is_trainable(self):
            return False

    def _dequantize(self, model, dtype=None):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)
        return model

    if can_dequantise:
        Halving._dequantize = _dequantize
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "halving", HalvingConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "halving", Halving)
    meant = saved(tmp_path / "model", torch.float32, quant_method="halving")
    if not can_dequantise:
        refused(tmp_path / "model", "cannot dequantise model, quantised by halving")
        return
    model = load(tmp_path / "model", device="cpu").model
    assert all(torch.equal(weight, 2 * meant[name].float()) for name, weight in model.named_parameters())
