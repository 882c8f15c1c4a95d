"""The device and dtype a run uses, and the record of what ran.

torch is imported inside the functions: the command line reads this module before it knows whether torch is needed.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import reprlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from sinkscope.arguments import check_choice
from sinkscope.errors import InputError, check_installed

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_placement(dtype: str, device: str, device_map: Any = None) -> None:
    """Refuses unknown dtypes and devices, and a device together with a device map; needs no torch."""
    check_choice("dtype", dtype, DTYPE_NAMES)
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
        raise InputError(f"`device` cannot be {reprlib.repr(device)}. Use auto, cpu, cuda or cuda:N.")
    if isinstance(device_map, str) and not re.fullmatch(
        r"auto|balanced|balanced_low_0|sequential|cpu|cuda(:[0-9]{1,3})?", device_map
    ):
        raise InputError(
            f"`device_map` cannot be {reprlib.repr(device_map)}. Use auto, balanced, balanced_low_0, sequential or a "
            "device, or from Python a dictionary."
        )
    if device_map is not None and device != "auto":
        raise InputError("`device` and `device_map` cannot be given together. Leave one of the two out.")
    if device_map is not None:
        check_installed("`device_map`", "gguf", "accelerate")


def resolve_device(name: str | None = None) -> torch.device:
    """The device called `name`; a GPU where there is one, else the CPU, for None or "auto"."""
    check_placement("auto", "auto" if name is None else name)
    import torch

    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= num_devices:
            raise InputError(
                f"There is no device {name!r}: torch sees {num_devices} CUDA devices. Give `device='cpu'`, or "
                "`device='auto'` to take what is there."
            )
    return device


def resolve_dtype(name: str) -> torch.dtype | Literal["auto"]:
    """The torch dtype called `name`, or "auto" itself: the dtype the checkpoint was saved in."""
    check_placement(name, "auto")
    if name == "auto":
        return "auto"
    import torch

    return getattr(torch, name)


def check_torch_defaults() -> None:
    """Refuses to work if the default dtype or device of torch was changed."""
    import torch

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32 or device.type != "cpu":
        raise InputError(
            f"The defaults of torch must be its own, float32 on the CPU, not {str(dtype).removeprefix('torch.')} on "
            f"{device}. Undo torch.set_default_dtype and torch.set_default_device; load() takes a dtype and a device."
        )


def environment(*, device: torch.device | str | None = None, **extra: Any) -> dict[str, Any]:
    """What ran, as plain JSON values: versions, platform, device, threads, the start time and the `extra` entries.

    `device` is the device the run used; None means the one "auto" picks. Run folders are shared, so nothing here may
    reveal whose machine it was: of a path among the extra entries only the last part is recorded.
    """
    import torch

    device = torch.device(device) if device is not None else resolve_device()
    record = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sinkscope": _version("sinkscope"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        # Not platform.platform(): a kernel release can name the machine it was built for.
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": str(device),
        "device_name": _device_name(device),
        "num_threads": torch.get_num_threads(),
    }
    if twice := record.keys() & extra.keys():
        raise ValueError(f"environment() already records {sorted(twice)}")
    return record | {key: _plain(value) for key, value in extra.items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, PurePath) or (isinstance(value, str) and value.startswith(("/", "~"))):
        return PurePath(value).name
    return value
