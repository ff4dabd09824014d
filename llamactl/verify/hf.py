"""transformers as the reference, from a local folder."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from llamactl.errors import InputRefused, NotAvailable

KERNELS = ("sdpa", "eager")


def transformers_side(folder: str, *, kernel: str = "sdpa") -> nn.Module:
    """transformers' own causal language model of a Hugging Face folder, in fp32, none of its weights made up.

    kernel: sdpa or eager. No code from the folder is run and no socket opened.
    Errors: NotAvailable extra-missing; InputRefused transformers-load where it refuses or leaves weights unfilled.
    """
    if kernel not in KERNELS:
        raise ValueError(f"{kernel!r} is not one of {KERNELS}")
    if find_spec("transformers") is None:
        raise NotAvailable("extra-missing", "this needs transformers, which is not installed",
                           help="pip install 'llamactl[reference]'")
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise InputRefused("transformers-load", "transformers reads folders with a config.json, and this is none",
                           path=folder, help="give the reference as another checkpoint or a recorded reference")
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, said = auto.from_pretrained(
                os.path.abspath(folder), dtype=torch.float32, attn_implementation=kernel, trust_remote_code=False,
                local_files_only=True, output_loading_info=True)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as e:
        first = " ".join(str(e).split())[:300]
        raise InputRefused("transformers-load", f"transformers cannot load it: {type(e).__name__}: {first}",
                           path=folder, help="give the reference as another checkpoint or a recorded reference") from e
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    absent = [*sorted(said["missing_keys"]), *sorted(str(x) for x in said["mismatched_keys"])]
    if absent:
        raise InputRefused("transformers-load", f"transformers fills {len(absent):,} tensors with random numbers, "
                           f"{absent[0]} among them", path=folder,
                           help="give the reference as another checkpoint or a recorded reference")
    found: nn.Module = model.eval()
    return found
