"""The prefixes under which the same tensors are saved, and which left-over names are known for what they are.

The same weights are saved with and without `model.`, under wrappers, and with a language model inside or outside a
larger one. Each known way is tried on all names at once; the one with the fewest differences is used and named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

Pairs = tuple[tuple[str, str], ...]  # (prefix in the file, prefix in the model); the first that fits is taken

WRAPPERS = ("model.", "transformer.", "module.", "_orig_mod.", "base_model.model.", "language_model.",
            "model.language_model.", "_fsdp_wrapped_module.")
LANGUAGE: tuple[Pairs, ...] = (
    (),
    (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")),
    (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
     *((f"{x}.", f"model.{x}.") for x in ("vision_tower", "multi_modal_projector", "visual", "vision_model"))),
    (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("visual.", "model.visual."), ("model.", "model.language_model.")),
    (("model.visual.", "visual."), ("model.language_model.", "model.")),
)
VISION: tuple[Pairs, ...] = (
    (), (("vision_tower.vision_model.", "vision_tower."),), (("vision_tower.", "vision_tower.vision_model."),),
    (("model.vision_tower.vision_model.", "model.vision_tower."),),
    (("model.vision_tower.", "model.vision_tower.vision_model."),),
)
# What a description leaves out -> how the names of its tensors begin, beside the layers after the last.
LEFT_OUT = {
    "multi-token": ("mtp.", "model.mtp.", "mtp_"),
    "vision": ("vision_tower.", "vision_model.", "visual.", "model.visual.", "model.vision_tower.", "mm_projector.",
               "model.vision_model.", "multi_modal_projector.", "model.multi_modal_projector.", "vision_embed_tokens."),
    "audio": ("audio_tower.", "model.audio_tower.", "embed_audio.", "model.embed_audio."),
}
_SAMPLE = 200


def best(names: Sequence[str], want: Mapping[str, object]) -> tuple[str | None, dict[str, str]]:
    """(how names are rewritten, None for as they stand; {stored name: the model's name}): the fewest differences."""
    plain = {n: n for n in names}
    found: tuple[str | None, dict[str, str]] = (None, plain)
    fewest = _differences(plain.values(), want)
    if not fewest or not want or not names:
        return found
    sample = names[:: max(1, len(names) // _SAMPLE)]
    for pairs in _rewrites(want):
        if not any(renamed(n, pairs) in want for n in sample):
            continue
        of = {n: renamed(n, pairs) for n in names}
        if len(set(of.values())) < len(names):
            continue
        n = _differences(of.values(), want)
        if n < fewest:
            fewest, found = n, (_told(pairs), of)
    return found


def _rewrites(want: Mapping[str, object]) -> Iterator[Pairs]:
    """Every known way, the plainest first. A first word that is missing is the one most of the model's names have."""
    firsts = Counter(n.partition(".")[0] for n in want)
    base = firsts.most_common(1)[0][0]
    yield (*((f"{f}.", f"{f}.") for f in firsts), ("", f"{base}."))
    for wrapper in WRAPPERS:
        yield ((wrapper, ""),)
    for language in LANGUAGE:
        for vision in VISION:
            if language or vision:
                yield then(language, vision)


def then(first: Pairs, second: Pairs) -> Pairs:
    """One list of pairs that does what `first` and then `second` do."""
    both = [(a + rest, to) for a, b in first for x, to in second
            for rest in [x.removeprefix(b)] if x.startswith(b)]
    return (*both, *((a, renamed(b, second)) for a, b in first), *second)


def renamed(name: str, pairs: Pairs) -> str:
    """`name` with the first prefix of `pairs` that it has rewritten."""
    for old, new in pairs:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _differences(names: Iterable[str], want: Mapping[str, object]) -> int:
    have = set(names)
    both = len(have & want.keys())
    return len(have) + len(want) - 2 * both


def _told(pairs: Pairs) -> str:
    changes = [(a, b) for a, b in pairs if a != b]
    return ", ".join(f"{a or 'no prefix'} -> {b or 'no prefix'}" for a, b in changes)


def grouped(names: Iterable[str], patterns: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """{why: names} of the names that a pattern takes; `{i}` in it stands for a layer's number, `*` for anything."""
    made = [(re.compile(re.escape(p).replace(r"\{i\}", r"\d{1,5}").replace(r"\*", ".*")), why) for p, why in patterns]
    out: dict[str, list[str]] = {}
    for name in names:
        for pattern, why in made:
            if pattern.fullmatch(name):
                out.setdefault(why, []).append(name)
                break
    return out


def beyond(names: Iterable[str], want: Mapping[str, object], n_layers: int) -> list[str]:
    """Names of layers that stand, without a gap, after the last of the model's own."""
    blocks = {n[: m.start(1)] for n in want if (m := re.search(r"\.(\d+)\.", n)) and int(m[1]) == n_layers - 1}
    out: dict[int, list[str]] = {}
    for name in names:
        m = re.search(r"\.(\d{1,5})\.", name)
        if m and name[: m.start(1)] in blocks and int(m[1]) >= n_layers:
            out.setdefault(int(m[1]), []).append(name)
    return [n for i in range(len(out)) for n in out.get(n_layers + i, [])]
