"""`bench` at work: open the model and its rivals, time them in turn, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llamactl.cli.memory import enough
from llamactl.cli.options import Access, Output
from llamactl.errors import InputRefused, OutputError, UsageError

if TYPE_CHECKING:
    from llamactl.analysis.bench import BenchReport, Case
    from llamactl.analysis.generation import Quality
    from llamactl.cli.runnable import Opened
    from llamactl.net.bench import Engine, Started
    from llamactl.spec.model import Model

Warnings = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked. Empty lengths and no `new`: the defaults that the model's context holds."""

    ref: str | None
    prompts: tuple[int, ...]
    after: tuple[int, ...]
    new: int | None
    batches: tuple[int, ...]
    repeat: int
    rivals: tuple[str, ...]
    gguf: str | None
    device: str
    dtype: str
    threads: int | None
    compile: bool
    pack: bool
    quant: str | None

    def inputs(self) -> dict[str, Any]:
        """What the JSON says was asked for."""
        said = asdict(self)
        del said["ref"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in said.items()}


def run(asked: Asked, out: Output, reach: Access) -> None:
    """Do what is asked, and print it. Raises LlamactlError."""
    from llamactl.analysis.bench import cases
    from llamactl.api import Loaded
    from llamactl.cli.located import need_torch
    from llamactl.cli.runnable import open_model
    from llamactl.cli.show import show

    need_torch()
    from llamactl.net.rivals import check_installed

    for name in asked.rivals:
        check_installed(name)
    opened = open_model(asked.ref, reach)
    places = [_place(name, asked, opened) for name in asked.rivals]
    asked_cases = cases(opened.model, asked.prompts, asked.after, asked.new, asked.batches)
    said = [*opened.warnings, *_past(opened.model, asked_cases)]
    report = _measured(asked, opened, places, asked_cases, said, _teller(out))
    show("bench", [Loaded(model=opened.model, source=opened.source)], [report], asked.inputs(), out, warnings=said)


def _place(name: str, asked: Asked, opened: Opened) -> str:
    """Where a rival finds the same model. Raises UsageError and InputRefused (rival-format, rival-model)."""
    source = opened.source
    if name == "transformers":
        if source.form != "hf" or source.folder is None:
            raise InputRefused("rival-format", "transformers reads a folder in Hugging Face's form, and this is none",
                               path=source.path, help="leave out --against transformers")
        return source.folder
    if source.form == "gguf" and asked.gguf is None:
        assert source.path is not None
        return source.path
    if asked.gguf is None:
        raise UsageError("usage", "--against llama.cpp needs a .gguf file", help="give it with --gguf FILE")
    from llamactl.api import load

    path = os.path.expanduser(asked.gguf)
    other, ours = load(path if os.path.dirname(path) else os.path.join(".", path), offline=True), opened.model
    if other.source.form != "gguf":
        raise InputRefused("rival-format", "llama.cpp reads a .gguf file, and this is none", path=path)
    shapes = [(m.embed.vocab, m.embed.dim, len(m.layers)) for m in (ours, other.model)]
    if shapes[0] != shapes[1]:
        raise InputRefused("rival-model", "another model: {} tokens x {} in {} layers, not {} x {} in {}".format(
            *shapes[1], *shapes[0]), path=path, help="give the .gguf of the model that is timed")
    return path


def _past(model: Model, timed: Sequence[Case]) -> Warnings:
    """A warning for lengths past what the model was made for. Raises InputRefused past its table of positions."""
    from llamactl.net.generate import positions

    longest, table, usable = max(c.length for c in timed), positions(model), model.context.usable
    if table is not None and longest > table:
        raise InputRefused("too-long", f"{longest:,} tokens, but this model's table of positions ends at {table:,}",
                           help="lower --prompt-tokens, --decode-after or --new")
    if usable is None or longest <= usable:
        return []
    return [("context-exceeded", f"up to {longest:,} tokens, past the {usable:,} positions this model was made for "
             f"({model.context.why}): its speed there is real, the quality of its text is not promised")]


def _measured(asked: Asked, opened: Opened, places: Sequence[str], timed: Sequence[Case], said: Warnings,
              tell: Any) -> BenchReport:
    """Load all engines, time them, and put the report together. Adds to the warnings `said`."""
    from llamactl.analysis import bench as analysis
    from llamactl.analysis.generation import weights_bytes
    from llamactl.net import bench as room
    from llamactl.net import device as devices

    model, source = opened.model, opened.source
    if asked.threads is not None:
        devices.use_threads(asked.threads)
    device = devices.find_device(asked.device)
    stored = devices.stored_dtype(opened.weights, model)
    int8 = asked.quant == "int8"
    wish = "bf16" if int8 and asked.dtype == "auto" and device.type == "cpu" else asked.dtype
    dtype = devices.choose_dtype(wish, stored, device)
    word, vocab = devices.WORDS[dtype], model.embed.vocab
    longest, most = max(c.length for c in timed), max(c.length * c.batch for c in timed)
    first = room.prompts(vocab, 1, min(c.tokens for c in timed))
    with _room(model, word, most, device, stored=None if asked.pack else stored, int8=int8):
        engines = [_ours(asked, device, dtype, first, said)]
        engines += [_rival(name, place, longest, device, dtype, first)
                    for name, place in zip(asked.rivals, places, strict=True)]
        meter = room.Meter(device, dtype)
        done = room.measure([e.engine for e in engines], timed, meter, vocab=vocab, repeat=asked.repeat, tell=tell)
        quality = _quality(engines[0].engine, opened, first[0]) if int8 else None
    kinds = {"llamactl": asked.quant or word, "transformers": word, "llama.cpp": _stored(places, asked)}
    infos = tuple(analysis.Engine(name=e.engine.name, version=_version(e.engine), dtype=kinds[e.engine.name],
                                  load_seconds=e.load_s, first_token_seconds=e.first_s, private_bytes=e.private)
                  for e in engines)
    if "llama.cpp" in asked.rivals and max(asked.batches) > 1:
        said.append(("rival-batch", "llama.cpp is timed with one sequence alone, for its Python binding takes no more"))
    bandwidth, matmul = meter.bytes or None, meter.flops or None
    made = analysis.rows(model, word, list(zip(timed, (d.seconds for d in done), strict=True)), infos, bandwidth,
                         matmul, int8=int8)
    return analysis.BenchReport(
        id=source.id, family=model.family, model_type=model.model_type, device=device.type,
        device_name=devices.name_of(device), dtype=word, quant=asked.quant,
        quant_quality=quality, threads=room.threads(device),
        compiled=asked.compile, packed=asked.pack, repeat=asked.repeat,
        weights_bytes=weights_bytes(model, word, int8=int8),
        bandwidth_bytes_per_second=bandwidth, matmul_flops_per_second=matmul, first_token_prompt=len(first[0]),
        engines=infos, rows=made)


def _ours(asked: Asked, device: Any, dtype: Any, first: list[list[int]], said: Warnings) -> Started:
    from llamactl.cli.runnable import open_model
    from llamactl.net.aot import identity
    from llamactl.net.bench import Ours, start
    from llamactl.net.cache import Cache
    from llamactl.net.compiling import ready
    from llamactl.net.decoder import Decoder, build
    from llamactl.net.generate import cache_length
    from llamactl.net.int8 import assign_int8
    from llamactl.net.packing import pack

    def load() -> Engine:
        again = open_model(asked.ref, Access(offline=True, hub=False))  # once more, now that nothing is left to import
        network = build(again.model)
        assign = assign_int8 if asked.quant else Decoder.assign
        assign(network, again.weights, dtype=dtype, device=device)
        if asked.pack and not asked.compile and not pack(network):  # compiling packs by itself
            said.append(("pack", f"--pack changes nothing here: it is for bf16 on a CPU that multiplies it, not for "
                         f"{str(dtype).removeprefix('torch.')} on this {device.type}"))
        cache = Cache(again.model, 1, cache_length(again.model, len(first[0]), 4), dtype=dtype, device=device)
        told = identity(again.weights.path) if asked.compile else ()
        return Ours(network, ready(network, first[0], cache, compile=asked.compile, identity=told, say=_say))

    return start(load, first)


def _quality(ours: Any, opened: Opened, ids: list[int]) -> Quality:
    """What int8 changes on the first of the timed texts."""
    from llamactl.analysis.generation import Quality
    from llamactl.net.int8 import divergence

    return Quality(**divergence(ours.network, opened.weights, ids)._asdict())


def _rival(name: str, place: str, longest: int, device: Any, dtype: Any, first: list[list[int]]) -> Started:
    from llamactl.net.bench import start
    from llamactl.net.rivals import LlamaCpp, Transformers

    if name == "transformers":
        Transformers.prepare(place)
        return start(lambda: Transformers(place, device, dtype), first)
    LlamaCpp.prepare()
    return start(lambda: LlamaCpp(place, length=longest + 1, device=device), first)


def _stored(places: Sequence[str], asked: Asked) -> str | None:
    """What most of the .gguf for llama.cpp is stored in, by llamactl's name."""
    if "llama.cpp" not in asked.rivals:
        return None
    from llamactl.api import load
    from llamactl.spec.dtype import find_dtype

    found = load(places[asked.rivals.index("llama.cpp")], offline=True).model.stored_as
    kind = find_dtype(found.partition(" ")[0]) if found else None
    return kind.name if kind else None


def _version(engine: Any) -> str:
    from llamactl import __version__

    return str(getattr(engine, "version", __version__))


@contextmanager
def _room(model: Model, word: str, tokens: int, device: Any, *, stored: str | None, int8: bool) -> Iterator[None]:
    """Refuse what cannot fit before it is loaded, and turn running out of memory into the same one line."""
    from llamactl.analysis.generation import needed
    from llamactl.net import device as devices

    free = devices.free_memory(device)
    takes = needed(model, dtype=word, ctx=tokens, stored=stored, device=device.type, int8=int8)
    error = OutputError("memory", f"out of memory on {device.type}: weights and a cache of {tokens:,} tokens take "
                        f"{takes:,} B" + ("" if free is None else f"; {free:,} B are free"),
                        help="lower --batch, --prompt-tokens or --decode-after, or time fewer engines")
    if free is not None and takes > free:
        raise error
    with enough(error):
        yield


def _teller(out: Output) -> Any:
    """What says on a terminal which case is being timed; nothing elsewhere."""
    silent = out.format == "json" or out.quiet or "CI" in os.environ or not sys.stderr.isatty()

    def tell(case: Any) -> None:
        what = "prompts of" if case.phase == "prefill" else f"{case.new:,} tokens after"
        _say(f"timing {what} {case.tokens:,} tokens, batch {case.batch}")

    return (lambda _: None) if silent else tell


def _say(line: str) -> None:
    print(line, file=sys.stderr)
