"""Loads a model of transformers in which each head is normalised before the output projection: o / RMS(o) * lambda, and
an offset.

sinkscope writes this file beside the weights. With it they load without sinkscope:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

config.json has a model type of its own, so that nothing loads the weights and silently leaves the norms out.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

MODEL_TYPE = "sinkscope_head_norm"
NOTICE = "This model has norms that its class does not know. Use AutoModelForCausalLM with trust_remote_code=True."


class HeadNormConfig(PreTrainedConfig):
    """`model` is the configuration of the model without norms, of the type `base`; `head_norm` says where the norms
    are, and of what kind."""

    model_type = MODEL_TYPE

    def __init__(self, base=None, model=None, head_norm=None, **kwargs):
        super().__init__(**kwargs)
        self.base, self.model, self.head_norm = base, model, head_norm


class HeadNormForCausalLM(PreTrainedModel):
    """`from_pretrained` gives the model of transformers itself, with its norms."""

    config_class = HeadNormConfig

    @classmethod
    def from_pretrained(cls, folder, *args, config=None, **kwargs):
        config = HeadNormConfig.from_pretrained(folder) if config is None else config
        base = AutoConfig.for_model(config.base, **config.model)
        model_class = with_norms(getattr(transformers, base.architectures[0]), config.head_norm)
        return model_class.from_pretrained(folder, *args, config=base, **kwargs)


class HeadNorm(nn.Module):
    """The norm of the input of an output projection [..., H * D]."""

    def __init__(self, num_heads, head_size, per_head, offset, fixed, initial_lambda):
        super().__init__()
        self.heads = num_heads, head_size
        shape = self.heads if per_head else (head_size,)
        self.weight = nn.Parameter(torch.full(shape, float(initial_lambda)), requires_grad=not fixed)
        self.offset = nn.Parameter(torch.zeros(shape)) if offset else None

    def forward(self, x):
        wide = x.unflatten(-1, self.heads).float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return (normed if self.offset is None else normed + self.offset).to(x.dtype).flatten(-2)


def with_norms(base, settings):
    """The class of a model, made to have the norms."""

    class WithNorms(base):
        # As in training, whatever type the other weights are loaded in.
        _keep_in_fp32_modules_strict = (*(base._keep_in_fp32_modules_strict or ()), "head_norm")

        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, **kwargs)
            for path, heads in settings["projections"].items():
                projection = self.get_submodule(path)
                projection.add_module("head_norm", HeadNorm(*heads, **settings["options"]))
                projection.register_forward_pre_hook(normalised)

        def save_pretrained(self, save_directory, **kwargs):
            super().save_pretrained(save_directory, **kwargs)
            write_beside(save_directory, settings)

    WithNorms.__name__, WithNorms.__module__ = base.__name__, base.__module__
    return WithNorms


def normalised(projection, args):
    return (projection.head_norm(args[0]), *args[1:])


def write_beside(folder, settings):
    """Makes a saved model one that needs its norms: this file, and a config.json that names it."""
    file = Path(folder) / "config.json"
    model = json.loads(file.read_text())
    model.pop(MODEL_TYPE, None)
    name = Path(__file__).stem
    described = {
        "architectures": [HeadNormForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": f"{name}.{HeadNormConfig.__name__}",
            "AutoModelForCausalLM": f"{name}.{HeadNormForCausalLM.__name__}",
        },
        # Apart from the rest: a class of transformers that finds its own type in here would take the rest for its own.
        # It then stops at a size that is no number.
        "vocab_size": NOTICE,
        "base": model.pop("model_type"),
        "head_norm": settings,
        "model": model,
        "model_type": MODEL_TYPE,
    }
    file.write_text(json.dumps(described, indent=2) + "\n")
    shutil.copyfile(__file__, Path(folder) / Path(__file__).name)
