"""Models of the Hugging Face Hub as folders, fetched once; a model is refused before its weights are fetched."""

from __future__ import annotations

from pathlib import Path

from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import (
    ADAPTER,
    ask,
    causal_config,
    check_no_adapter,
    check_weight_names,
    first_line,
    looks_like_hub_name,
    refuse_path,
)

HUB_TIMEOUT_S = 5.0
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
WEIGHT_FILES = ["model.safetensors", "model-*-of-*.safetensors"]


def download(name: str, path: Path, revision: str | None, trust_remote_code: bool) -> Path:
    """The folder of the Hub's snapshot of `name`, fetched or cached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if not looks_like_hub_name(name):
        refuse_path(path)
    small = SMALL_FILES + ["*.py"] * trust_remote_code
    try:
        # Asked once and with a timeout: the downloads themselves retry for half a minute without a network.
        listing = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise InputError(
            expected="access to the model",
            found=f"{name} is gated on the Hub",
            next_step="Accept its terms on its page, then log in with `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            expected="a folder, a .gguf file or a Hugging Face name",
            found=f"no {name!r} here, nor on the Hub",
            next_step="Check the spelling; for a private model, log in with `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            expected=f"a revision of {name}",
            found=repr(revision),
            next_step="Give a branch, tag or commit as `revision`",
        ) from error
    except Exception as error:  # The HTTP library changes with the version of the Hub client; its errors share no base.
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:
            raise InputError(
                expected="a folder, a .gguf file or a Hugging Face name",
                found=f"no {name!r} here or in the download cache, and no way to reach the Hub ({first_line(error)})",
                next_step="Check the spelling of a path, or the network connection",
            ) from error
    names = {file.rfilename for file in listing.siblings or ()}
    complete = "a complete download", "Run the command again to resume it"
    where = {"repo_id": name, "revision": listing.sha, "ignore_patterns": ["*/*"]}
    if ADAPTER in names:
        check_no_adapter(Path(ask(*complete, snapshot_download, **where, allow_patterns=[ADAPTER])), name)
    check_weight_names(names, name)
    folder = Path(ask(*complete, snapshot_download, **where, allow_patterns=small))
    causal_config(folder, name, trust_remote_code)  # refused before gigabytes of weights come, not after
    return Path(ask(*complete, snapshot_download, **where, allow_patterns=small + WEIGHT_FILES))
