"""`generate` at work: open the model, turn the prompt into tokens, write the text as it comes, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl.cli.memory import enough
from llamactl.cli.options import Access, Output
from llamactl.cli.printing import Printer
from llamactl.cli.sampling import Settings, settle
from llamactl.errors import NotAvailable, printable

if TYPE_CHECKING:
    from llamactl.analysis.generation import GenerateReport
    from llamactl.cli.runnable import Opened
    from llamactl.net.group import Group
    from llamactl.net.parallel import Split
    from llamactl.spec.model import Model
    from llamactl.tokens import Tokenizer

Warnings = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked. ids or text is the prompt; text may be a user's turn (chat)."""

    ref: str | None
    ids: list[int] | None
    text: str | None
    chat: bool
    system: str | None
    max_new: int
    greedy: bool
    given: Mapping[str, float | None]
    seed: int | None
    stop: tuple[str, ...]
    ignore_end: bool
    logprobs: bool
    device: str
    dtype: str
    threads: int | None
    compile: bool
    pack: bool
    quant: str | None
    tp: int = 1

    def inputs(self) -> dict[str, Any]:
        """What the JSON says was asked for."""
        settings = {k: v for k, v in self.given.items() if v is not None}
        return {"prompt": self.text, "tokens": self.ids, "chat": self.chat, "system": self.system,
                "max_new": self.max_new, "greedy": self.greedy, **settings, "seed": self.seed, "stop": list(self.stop),
                "ignore_end": self.ignore_end, "logprobs": self.logprobs, "device": self.device, "dtype": self.dtype,
                "threads": self.threads, "compile": self.compile, "pack": self.pack,
                "quant": self.quant, "tp": self.tp}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The prompt as tokens, the tokenizer (None: the ids are the text), what ends a text, how tokens are drawn."""

    ids: list[int]
    tokenizer: Tokenizer | None
    end: frozenset[int]
    settings: Settings


def run(asked: Asked, out: Output, reach: Access, group: Group | None = None) -> None:
    """Do what is asked, and print it. Raises LlamactlError.

    group: the processes that share the work. The first of them reads the prompt and prints.
    """
    from llamactl.cli.located import need_torch
    from llamactl.cli.runnable import open_model
    from llamactl.cli.show import print_json

    need_torch()
    from llamactl.net.decoder import build
    from llamactl.render.generate import speeds

    begin = time.perf_counter()
    opened = open_model(asked.ref, reach)
    split = _split(opened.model, group)
    network = split.decoder if split else build(opened.model)  # what cannot run is refused before anything is read
    if group is not None and group.rank > 0:
        printer = Printer(None, asked.stop, live=False, follows=True)
        _generated(asked, opened, network, shared(group, None), printer, out, begin, split)
        return
    words = shared(group, read_words(asked, opened))
    said = list(dict.fromkeys([*opened.warnings, *_past(opened.model, len(words.ids) + asked.max_new)]))
    silent = out.format == "json" and not out.quiet
    for code, message in () if silent else said:
        _say(f"warning[{code}]: {printable(message)}")
    printer = Printer(words.tokenizer, asked.stop, live=not silent, follows=not asked.chat)
    report = _generated(asked, opened, network, words, printer, out, begin, split)
    if silent:
        source = opened.source.to_dict()
        body = {"id": report.id, "source": source, **report.to_dict()}
        print_json("generate", [source], {"models": [body]}, asked.inputs(), said)
    elif not out.quiet:
        _say(speeds(report))


def read_words(asked: Asked, opened: Opened) -> Words:
    """The prompt as the model's own files turn it into tokens, and what they say of ends and drawing.

    Without a tokenizer token ids are read and printed. Raises what the room tokens does, and check_ids.
    """
    from llamactl import tokens
    from llamactl.net.generate import check_ids

    where, model = place(opened), opened.model
    tokenizer = None
    try:
        tokenizer = tokens.open_tokenizer(where, model_type=model.model_type, vocab=model.embed.vocab)
    except NotAvailable:
        if asked.ids is None or asked.stop:
            raise
    ids = asked.ids
    if ids is None:
        assert tokenizer is not None
        assert asked.text is not None
        if asked.chat:
            said = (("system", asked.system), ("user", asked.text))
            turns = [{"role": role, "content": text} for role, text in said if text is not None]
            ids = tokens.chat(where, tokenizer, turns)
        else:
            ids = tokenizer.encode(asked.text)
    check_ids(model, ids)
    end = frozenset() if asked.ignore_end else tokens.end_tokens(where, tokenizer)
    settings = settle(asked.given, asked.greedy, tokens.sampling_defaults(where), asked.seed)
    return Words(ids=ids, tokenizer=tokenizer, end=end, settings=settings)


def shared(group: Group | None, words: Words | None) -> Words:
    """What the first process of a group read, on every one of them."""
    if group is None:
        assert words is not None
        return words
    told = None if words is None else {"ids": words.ids, "end": sorted(words.end), "settings": words.settings}
    told = group.share(told)
    return words or Words(ids=told["ids"], tokenizer=None, end=frozenset(told["end"]),
                          settings=Settings(*told["settings"]))


def _split(model: Model, group: Group | None) -> Split | None:
    if group is None:
        return None
    from llamactl.net.parallel import Split

    return Split(model, group)


def place(opened: Opened) -> str:
    """The folder or the .gguf file that holds the tokenizer too."""
    import os

    source = opened.source
    assert source.path is not None
    return source.path if source.form == "gguf" else source.folder or os.path.dirname(source.path) or "."


def _past(model: Model, length: int) -> Warnings:
    """A warning for a text longer than the model was made for; a table of positions ends it by itself."""
    from llamactl.net.generate import positions

    usable = model.context.usable
    if usable is None or length <= usable or positions(model) is not None:
        return []
    return [("context-exceeded", f"prompt and text may be {length:,} tokens, past the {usable:,} positions this model "
             f"was made for ({model.context.why}): the quality of its text there is not promised")]


def _generated(asked: Asked, opened: Opened, network: Any, words: Words, printer: Printer, out: Output,
               begin: float, split: Split | None) -> GenerateReport:
    """Give the network its weights, let it write, and report. split: where this process has a share of the work."""
    from llamactl.analysis.generation import Draw, GenerateReport, Quality, bytes_read, weights_bytes
    from llamactl.net import device as devices
    from llamactl.net.aot import identity
    from llamactl.net.cache import Cache
    from llamactl.net.compiling import ready
    from llamactl.net.decoder import Decoder
    from llamactl.net.generate import cache_length, generate
    from llamactl.net.int8 import assign_int8, divergence
    from llamactl.net.packing import pack
    from llamactl.net.sample import Sampling

    model = opened.model
    group = split.group if split else None
    if asked.threads is not None:
        devices.use_threads(asked.threads)
    device = group.device if group else devices.find_device(asked.device)
    stored = devices.stored_dtype(opened.weights, model)
    int8 = asked.quant == "int8"
    wish = "bf16" if int8 and asked.dtype == "auto" and device.type == "cpu" else asked.dtype
    dtype = devices.choose_dtype(wish, stored, device)
    word, length = devices.WORDS[dtype], cache_length(model, len(words.ids), asked.max_new)
    settings = words.settings
    values: dict[str, Any] = {**settings.values, "top_k": int(settings.values["top_k"]), "seed": settings.seed}
    with _room(network.model, word, length, device, stored=None if asked.pack else stored, int8=int8):
        assign = assign_int8 if int8 else Decoder.assign
        assign(network, split.sliced(opened.weights) if split else opened.weights, dtype=dtype, device=device)
        cache = Cache(network.model, 1, length, dtype=dtype, device=device)
        if asked.pack and not asked.compile:  # compiling packs by itself
            pack(network)
        writer = split or ready(network, words.ids, cache, compile=asked.compile,
                                say=None if out.quiet or out.format == "json" else _say,
                                identity=identity(opened.weights.path) if asked.compile else ())
        loaded = time.perf_counter() - begin
        if out.verbose and (group is None or group.rank == 0):
            several = f"{group.world} processes, each on " if group else ""
            _say(f"{several}{devices.name_of(device)}; {word}{', int8 matrices' if int8 else ''}; {settings.say()}")
        with printer.lines():
            made = generate(writer, words.ids, max_new=asked.max_new, sampling=Sampling(**values), cache=cache,
                            end=words.end, on_token=_told(printer, group, asked.stop), logprobs=asked.logprobs,
                            sampler=split.sampler(Sampling(**values)) if split else None)
    peak, cached = devices.peak_memory(device), cache.nbytes
    if group is not None:
        peaks, caches = zip(*group.numbers(peak or 0, cached), strict=True)
        peak, cached = max(peaks) or None, sum(caches)
    quality = None
    if int8 and not out.quiet:
        with _room(network.model, word, length, device, stored=stored, int8=False):
            quality = Quality(**divergence(network, opened.weights, [*words.ids, *made.tokens])._asdict())
    moved = bytes_read(model, word, cache.filled, int8=int8)
    decode = made.decoded / made.decode_s if made.decoded and made.decode_s > 0 else None
    fastest = devices.bandwidth(device) if decode and not out.quiet and group is None else None
    return GenerateReport(
        id=opened.source.id, family=model.family, model_type=model.model_type,
        text=None if words.tokenizer is None else printer.text, prompt_token_ids=tuple(words.ids),
        token_ids=tuple(made.tokens), logprobs=None if made.logprobs is None else tuple(made.logprobs), stop=made.stop,
        sampling=Draw(**values), device=device.type, device_name=devices.name_of(device), dtype=word, quant=asked.quant,
        quant_quality=quality,
        processes=group.world if group else 1,
        prompt_tokens=len(words.ids), generated_tokens=len(made.tokens), load_seconds=loaded,
        prefill_seconds=made.prefill_s, first_token_seconds=made.first_token_s, decode_seconds=made.decode_s,
        prefill_tokens_per_second=len(words.ids) / made.prefill_s if made.prefill_s > 0 else None,
        decode_tokens_per_second=decode, weights_bytes=weights_bytes(model, word, int8=int8),
        kv_cache_bytes=cached, decode_bytes_per_token=moved, peak_memory_bytes=peak,
        bandwidth_bytes_per_second=fastest, bandwidth_share=decode * moved / fastest if decode and fastest else None)


def _told(printer: Printer, group: Group | None, stop: tuple[str, ...]) -> Callable[[int], bool]:
    """What is told each token: the printer, whose word that a stop string was met holds for all of a group."""
    if group is None or not stop:
        return printer.token
    return lambda token: group.agree(printer.token(token))


@contextmanager
def _room(model: Model, word: str, length: int, device: Any, *, stored: str | None, int8: bool) -> Iterator[None]:
    """Refuse what cannot fit before anything is taken, and turn running out of memory into the same one line."""
    from llamactl.analysis.generation import needed, shortage
    from llamactl.net import device as devices

    free = devices.free_memory(device)
    said: dict[str, Any] = {"dtype": word, "ctx": length, "stored": stored, "device": device.type, "int8": int8}
    if free is not None and needed(model, **said) > free:
        raise shortage(model, free=free, **said)
    with enough(shortage(model, free=free, **said)):
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr)
