"""One token's step compiled once by AOTInductor and kept on disk: the next start loads it in a fraction of a second.

Compiling takes a C++ compiler and a minute; loading takes neither them nor torch._inductor. The package holds the
weights in the order that the CPU reads fastest, so it belongs to exactly these weights, this torch and this CPU, all
of which its name is a digest of.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from llamactl.errors import NotAvailable, OutputError
from llamactl.net.attention import SelfAttention, Step
from llamactl.net.blocks import FeedForward
from llamactl.net.cache import Cache, LayerCache
from llamactl.net.decoder import Decoder
from llamactl.net.positions import Turn
from llamactl.spec.parts import MLP, Attention

FIRST = 2  # a compiled size is never 0 or 1, so the first tokens go the usual way


class ApartStep(Step):
    """One new token whose k and v are not in the cache yet: they come back beside the logits, to be written there."""

    apart = True

    def __init__(self, place: Tensor, turns: dict[Any, Turn], dtype: torch.dtype) -> None:
        super().__init__(0, 1, device=place.device, dtype=dtype, turns=turns)
        self.place = place
        self.made: list[Tensor] = []

    def keep(self, cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.made += [k, v]
        return k, v

    def places(self) -> Tensor:
        return self.place


class OneToken(nn.Module):
    """(id, place, rotations, past k and v of every layer) -> (logits, new k and v of every layer)."""

    def __init__(self, network: Decoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, place: Tensor, turns: list[Tensor], past: list[Tensor]) -> list[Tensor]:
        net = self.network
        pairs = {rope: Turn(turns[2 * i], turns[2 * i + 1]) for i, rope in enumerate(net.ropes)}
        step = ApartStep(place, pairs, net.dtype)
        x = net.embedded(ids, step)
        for i, block in enumerate(net.layers):
            x = block(x, step, LayerCache(*(t.transpose(0, 1)[None] for t in past[2 * i : 2 * i + 2])))
        return [net.logits(x), *step.made]


def can_compile(network: Decoder) -> bool:
    """Whether every part has a compiled form: attention with K and V, and feed-forwards without a choice of experts."""
    parts = all(isinstance(x.attn, Attention) and isinstance(x.mlp, MLP) and (x.attn.window or 8) >= 8
                for x in network.model.layers)
    return parts and not any(p.is_mkldnn for p in network.parameters())  # a packed matrix cannot be traced


class Compiled:
    """A decoder whose one-token steps run from a compiled package. Called as the decoder is."""

    def __init__(self, network: Decoder, package: Any) -> None:
        self.network, self.model, self.package = network, network.model, package
        self.parts = set(_parts(network))

    def __call__(self, ids: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        if cache is None or cache.pad is not None or ids.shape != (1, 1) or not self._seen(cache.filled):
            return self.network(ids, cache, last=last)  # type: ignore[no-any-return]
        start = cache.filled
        self.network.step(1, start, cache)  # refuses what is too long
        out = self.package.run(flat(self.network, ids, start, cache))
        for i, layer in enumerate(cache.layers):
            assert layer is not None
            layer.put(out[1 + 2 * i], out[2 + 2 * i], start)
        cache.filled = start + 1
        return out[0]  # type: ignore[no-any-return]

    def _seen(self, start: int) -> bool:
        """Whether every layer sees as many earlier tokens as a compiled size needs."""
        return all(start - first_past(part, start) >= FIRST for part in self.parts)


def flat(network: Decoder, ids: Tensor, start: int, cache: Cache) -> list[Tensor]:
    """The inputs of OneToken in order: id, place, cos and sin of each rope, past k and v of each layer."""
    out = [ids, torch.tensor([start])]
    for rope in network.ropes:
        out += network.turn(rope, start, start + 1, None, cache.length)
    for part, layer in zip(_parts(network), cache.layers, strict=True):
        first = first_past(part, start)
        assert layer is not None
        out += [t[0].transpose(0, 1)[first:start] for t in (layer.k, layer.v)]  # (S, K, D), one piece of memory
    return out


def first_past(part: Attention, place: int) -> int:
    """The first cached key that a token at `place` sees."""
    if part.window is None:
        return 0
    if part.window_kind == "chunked":
        return place // part.window * part.window
    return max(0, place - part.window + 1)


def compiled(network: Decoder, cache: Cache, identity: Iterable[str], *,
             say: Callable[[str], None] | None = None) -> Compiled:
    """The decoder with its one-token step compiled: from disk, else made now and kept there. Run on the CPU alone.

    identity: what tells these weights, and this program, from all others. say: told, once, that a minute begins.
    Raises NotAvailable (no-compiler) and OutputError where the package cannot be kept.
    """
    path = os.path.join(folder(), name(network, identity) + ".pt2")
    if not os.path.exists(path):
        if say is not None:
            say(f"note: compiling one token's step, once for these weights (a minute or two); kept in {path}")
        _make(network, cache, path)
    own(path)
    try:
        package = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    except RuntimeError:
        raise NotAvailable("cache-broken", "no compiled step any more", path=path,
                           help="remove it: the next --compile makes it anew") from None
    return Compiled(network, package)


def folder() -> str:
    """Where compiled steps are kept: $LLAMACTL_CACHE, else the user's cache folder. Made for this user alone."""
    base = os.environ.get("LLAMACTL_CACHE")
    if not base:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        base = os.path.join(base, "llamactl")
    path = os.path.join(base, "compiled")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as e:
        raise OutputError("cache-folder", f"cannot be made: {e.strerror}", path=path,
                          help="set LLAMACTL_CACHE to a folder of your own") from None
    own(path)
    return path


def own(path: str) -> None:
    """Refuse compiled code that somebody else could have put there."""
    if not hasattr(os, "getuid"):
        return
    info = os.stat(path)
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotAvailable("cache-owner", "compiled code is only loaded from a place that nobody else can write",
                           path=path, help=f"chmod go-w {path}, or set LLAMACTL_CACHE to a folder of your own")


def name(network: Decoder, identity: Iterable[str]) -> str:
    """A digest of all that the package depends on."""
    told = (torch.__version__, sys.version, cpu(), str(network.dtype),
            str(torch.get_num_threads()), repr(network.model), *sorted({type(m).__name__ for m in network.modules()}),
            *identity)
    return blake2b("\0".join(told).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def cpu() -> str:
    """This CPU by its name and by what it can do, for which the code is made."""
    said = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            lines = f.read(1 << 16).splitlines()
    except OSError:
        return " ".join(said)
    return " ".join([*said, *(next((x for x in lines if x.startswith(key)), "") for key in ("model name", "flags"))])


def identity(path: str) -> Iterator[str]:
    """What tells the weights at `path`, a folder or a file, from others: each file's place, size and time."""
    real = os.path.realpath(path)
    files = sorted(os.path.join(real, n) for n in os.listdir(real)) if os.path.isdir(real) else [real]
    for file in files:
        info = os.stat(file)
        yield f"{file} {info.st_size} {info.st_mtime_ns}"


def clear(folder: str, seconds: float = 3600) -> None:
    """Remove what runs left here that were killed while compiling: nothing takes that long."""
    for entry in os.scandir(folder):
        if entry.name.startswith("tmp") and entry.is_dir(follow_symlinks=False) and (
                time.time() - entry.stat(follow_symlinks=False).st_mtime > seconds):
            shutil.rmtree(entry.path, ignore_errors=True)


def _make(network: Decoder, cache: Cache, path: str) -> None:
    """Export, compile, and put the package at `path` whole or not at all."""
    import torch._inductor.config as config
    from torch.export import Dim

    clear(os.path.dirname(path))
    # Any place will do from which every layer sees a few tokens.
    start = next(n for n in range(9, 1 << 16) if all(n - first_past(p, n) > FIRST for p in _parts(network)))
    inputs = flat(network, torch.zeros(1, 1, dtype=torch.long), start, _room(network, cache, start + 1))
    n = 2 * len(network.ropes)
    args = (inputs[0], inputs[1], inputs[2:2 + n], inputs[2 + n:])
    reach = {(part.window, part.window_kind) for part in _parts(network)}
    dims = {key: Dim(f"seen_{n}", min=FIRST, max=1 << 24) for n, key in enumerate(sorted(reach, key=repr))}
    sizes = [{0: dims[part.window, part.window_kind]} for part in _parts(network) for _ in "kv"]
    shapes: Any = (None, None, [None] * n, sizes)
    with (tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as made, warnings.catch_warnings(),
          alone(network), _joined(network)):
        warnings.simplefilter("ignore")  # torch's remarks on its own inner workings, like what it tries, are not ours
        target = os.path.join(made, "step.pt2")
        try:
            with torch.no_grad(), config.patch(_options(network.dtype)), redirect_stderr(io.StringIO()):
                program = torch.export.export(OneToken(network), args, dynamic_shapes=shapes)
                torch._inductor.aoti_compile_and_package(program, package_path=target)
        except Exception as e:
            if isinstance(e, OSError):
                raise OutputError("cache-write", f"the compiled step could not be kept: {e.strerror or e}", path=path,
                                  help="set LLAMACTL_CACHE to a folder with room, or go on without --compile") from e
            if "torch" not in type(e).__module__:
                raise
            said = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
            raise NotAvailable("no-compiler", f"the step was not compiled: {said[:300]}",
                               help="go on without --compile, or install a C++ compiler") from e
        os.chmod(target, 0o600)
        os.replace(target, path)


def _options(dtype: torch.dtype) -> dict[str, Any]:
    """Inductor's: weights folded into the order that is read fastest.

    fp32 also tries a kernel made for each shape beside oneDNN's (SmolLM2 on one thread: 60 tokens/s against 38); in
    bf16 those lose in use what they win alone (44 against 78).
    """
    return {"freezing": True, "cpp.threads": torch.get_num_threads(), "max_autotune": dtype == torch.float32,
            "max_autotune_gemm_backends": "CPP,ATEN"}


@contextmanager
def alone(network: Decoder) -> Iterator[None]:
    """Every parameter in a storage of its own: of a view, the package would hold the whole file once more."""
    views = [(m, n, p) for m in network.modules() for n, p in m._parameters.items()
             if p is not None and p.untyped_storage().nbytes() != p.nbytes]
    try:
        for m, n, p in views:
            own_copy = p.detach().clone(memory_format=torch.contiguous_format)
            m._parameters[n] = nn.Parameter(own_copy, requires_grad=False)
        yield
    finally:
        for m, n, p in views:
            m._parameters[n] = p


@contextmanager
def _joined(network: Decoder) -> Iterator[None]:
    """q, k and v as one product and gate and up as one: a compiled step has its own copy of the weights anyway."""
    parts = [m for m in network.modules() if isinstance(m, SelfAttention | FeedForward)]
    try:
        for m in parts:
            m.join()
        yield
    finally:
        for m in parts:
            m.joint = None


def _parts(network: Decoder) -> list[Attention]:
    return [x.attn for x in network.model.layers if isinstance(x.attn, Attention)]


def _room(network: Decoder, like: Cache, length: int) -> Cache:
    """A small cache of the same kind, to trace with."""
    out = Cache(network.model, 1, length, dtype=like.dtype)
    out.length = like.length  # rotations that depend on the length are those of the text to come
    return out
