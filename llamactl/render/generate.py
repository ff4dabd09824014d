"""A model's words and a run's numbers for people: text that cannot steer a terminal, and one line of speeds."""

from __future__ import annotations

import re

from llamactl.analysis.generation import GenerateReport, Quality
from llamactl.render.units import size

# Controls but newline and tab; marks that reverse the writing direction; the two separators that some read as lines.
# Joiners and variation selectors stay: emoji and half of the world's scripts need them.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STOPS = {"end": "end token", "stop": "stop string", "length": "--max-new reached", "context": "no positions left"}


def harmless(text: str) -> str:
    """`text` for a terminal: newlines and tabs as they are, what could steer it escaped (ESC as \\x1b)."""
    return _STEERS.sub(lambda c: c[0].encode("unicode_escape").decode("ascii"), text)


def speeds(r: GenerateReport) -> str:
    """One line: tokens and tokens/s of prompt and text, time to the first token, peak memory, share of bandwidth."""
    words = [f"prompt {_tokens(r.prompt_tokens)}{_rate(r.prefill_tokens_per_second)}",
             f"generated {_tokens(r.generated_tokens)}{_rate(r.decode_tokens_per_second)} ({_STOPS[r.stop]})"]
    if r.first_token_seconds is not None:
        words.append(f"first token after {r.first_token_seconds:.3g} s")
    if r.peak_memory_bytes is not None:
        each = f" in the largest of {r.processes} processes" if r.processes > 1 else ""
        words.append(f"peak memory {size(r.peak_memory_bytes)}{each}")
    if r.bandwidth_share is not None and r.bandwidth_bytes_per_second is not None:
        words.append(f"{100 * r.bandwidth_share:.0f}% of the {r.bandwidth_bytes_per_second / 1e9:,.1f} GB/s that "
                     f"{r.device} reads")
    if (q := r.quant_quality) is not None:
        words.append(f"int8 against {r.dtype} {quality(q)}")
    return "; ".join(words)


def quality(q: Quality) -> str:
    """What int8 changed."""
    return (f"on {_tokens(q.positions)}: KL {q.mean_kl:.2g} nats on average, {q.max_kl:.2g} at most, same first choice "
            f"{100 * q.top1_agreement:.0f}%")


def _tokens(n: int) -> str:
    return f"{n:,} token{'' if n == 1 else 's'}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:,.1f}/s" if rate < 1000 else f" at {rate:,.0f}/s"
