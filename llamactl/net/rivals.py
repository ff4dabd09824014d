"""Other people's engines on the same model, timed as llamactl is: transformers, llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from llamactl.errors import InputRefused, NotAvailable
from llamactl.net.bench import Ids
from llamactl.net.device import is_out_of_memory
from llamactl.net.generate import wait

RIVALS = {  # name -> (module, what installs it)
    "transformers": ("transformers", "pip install 'llamactl[reference]'"),
    "llama.cpp": ("llama_cpp", "pip install llama-cpp-python"),
}


def check_installed(name: str) -> None:
    """Raise NotAvailable (extra-missing) where that engine is not here."""
    module, how = RIVALS[name]
    if find_spec(module) is None:
        raise NotAvailable("extra-missing", f"--against {name} needs {module}, which is not installed", help=how)


class Transformers:
    """AutoModelForCausalLM of a folder: its forward with a new cache, its own generate with greedy choice."""

    name = "transformers"

    def __init__(self, folder: str, device: torch.device, dtype: torch.dtype) -> None:
        """Load the network. Call `prepare` first. Raises InputRefused (rival-refused) where transformers does."""
        library = _transformers()
        self.version: str = library.__version__
        self.device = device
        self.model: Any = _loaded(self.name, lambda: library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False).to(device).eval())
        # The model's own settings may draw, penalise or stop; what is timed is the likeliest token, so many times.
        self.model.generation_config = library.GenerationConfig(do_sample=False, pad_token_id=0)
        self.last = {} if "logits_to_keep" not in _words(self.model) else {"logits_to_keep": 1}

    @staticmethod
    def prepare(folder: str) -> None:
        """Import what this model needs, so that loading it is timed and weighed alone. Errors: as those of loading."""
        library = _transformers()
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()

        def empty() -> None:
            config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)

        _loaded(Transformers.name, empty)

    def can(self, batch: int) -> bool:
        return True

    @torch.inference_mode()
    def prefill(self, ids: Ids) -> float:
        prompt = torch.tensor(ids, device=self.device)
        wait(self.device)
        begin = time.perf_counter()
        self.model(prompt, use_cache=True, **self.last).logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - begin

    def decode(self, ids: Ids, new: int) -> float:
        prompt, heard = torch.tensor(ids, device=self.device), _Clock()
        self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new + 1,
                            min_new_tokens=new + 1, streamer=heard)
        prompt_at, first, *rest = heard.times  # it is told the prompt too
        if len(rest) != new:
            raise InputRefused("rival-refused", f"transformers made {len(rest) + 1} tokens, not {new + 1}")
        return rest[-1] - first


class _Clock:
    """When each token came; what transformers calls a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""


class LlamaCpp:
    """llama-cpp-python on a .gguf file of the same model, in whatever that file stores, one sequence at a time."""

    name = "llama.cpp"

    def __init__(self, path: str, *, length: int, device: torch.device) -> None:
        """Load the file with room for `length` tokens, for as many threads as torch has.

        Raises InputRefused (rival-refused) where llama.cpp does not load it.
        """
        self.library = _llama_cpp()
        self.version: str = self.library.__version__
        threads = torch.get_num_threads()
        self.model: Any = _loaded(self.name, lambda: self.library.Llama(
            path, n_ctx=length, n_batch=min(2048, max(32, length)), n_threads=threads, n_threads_batch=threads,
            n_gpu_layers=0 if device.type == "cpu" else -1, verbose=False))

    @staticmethod
    def prepare() -> None:
        """Import it, so that loading is timed and weighed alone."""
        _llama_cpp()

    def can(self, batch: int) -> bool:
        return batch == 1

    def prefill(self, ids: Ids) -> float:
        self.model.reset()
        begin = time.perf_counter()
        self.model.eval(ids[0])
        self.library.llama_synchronize(self.model.ctx)
        return time.perf_counter() - begin

    def decode(self, ids: Ids, new: int) -> float:
        self.model.reset()  # else it would go on from the prompt that it holds
        made = self.model.generate(ids[0], temp=0.0)
        next(made)
        begin = time.perf_counter()
        for _ in range(new):
            next(made)
        took = time.perf_counter() - begin
        made.close()
        return took


def _transformers() -> Any:
    import transformers

    return transformers


def _llama_cpp() -> Any:
    import llama_cpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return llama_cpp


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    """What `load` gives; any failure but a want of memory is that engine's refusal, in its own first line."""
    try:
        return load()
    except Exception as e:
        if is_out_of_memory(e):
            raise
        said = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise InputRefused("rival-refused", f"{name} does not load this model: {said[:300]}",
                           help=f"leave out --against {name}") from e


def _words(model: Any) -> set[str]:
    """Names of the arguments of the model's forward."""
    import inspect

    return set(inspect.signature(model.forward).parameters)
