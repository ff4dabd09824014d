"""content.py for mixers that keep a state: a short text through transformers' module, and the same step by step.

One token alone would show only the last tap of a convolution and nothing that decays. So each mixer is run on a few
tokens in a row, and its recurrence is computed again from canonical tensors, token by token, as the papers write it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from llamactl.spec.state import GatedDeltaNet, Mamba, Mamba2, ShortConv, StateMixer

MIXER_CLASS = r"(Mixer|DeltaNet|ShortConv)$"
LENGTH = 12  # longer than every kernel here


def watch_state(mixer: nn.Module, s: dict[str, Any]) -> None:
    """What `mixer` makes of the first tokens that it was given, now in a row."""
    s["run_in"] = s["attn_in"][:LENGTH]
    s["dt_min"] = float(getattr(mixer, "time_step_limit", (0.0,))[0])
    s["run_norms"] = normed = []
    norms = [m for m in mixer.children() if type(m).__name__.endswith("RMSNorm")]
    handles = [m.register_forward_hook(lambda _, args, out: normed.append(out[0])) for m in norms]
    with torch.no_grad():
        s["run_out"] = mixer(s["run_in"][None])[0]
    for handle in handles:
        handle.remove()


def claims(
    part: StateMixer, at: str, t: Mapping[str, Tensor], s: dict[str, Any],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same from canonical tensors, beside what transformers made."""
    if isinstance(part, Mamba):
        for name, ours, theirs in zip(("dt", "b", "c"), selection(part, at, t, s)[2:], s["run_norms"], strict=False):
            yield f"state.{name}", ours, theirs  # y holds b and c as a product only, so their norms must be seen apart
    of = {Mamba: mamba, Mamba2: mamba2, GatedDeltaNet: delta_net, ShortConv: short_conv}
    yield "state", of[type(part)](part, at, t, s), s["run_out"]  # type: ignore[operator]


def linear(t: Mapping[str, Tensor], at: str, x: Tensor, bias: bool = False) -> Tensor:
    return F.linear(x, t[f"{at}.weight"], t[f"{at}.bias"] if bias else None)


def conv(t: Mapping[str, Tensor], at: str, x: Tensor, bias: bool) -> Tensor:
    """Each channel of x (T, C) with its own taps on the token itself and those before it."""
    taps = t[f"{at}.conv.weight"][:, 0]
    padded = torch.cat((torch.zeros(taps.shape[1] - 1, x.shape[1]), x))
    out = torch.stack([(padded[i : i + taps.shape[1]] * taps.T).sum(0) for i in range(len(x))])
    return out + t[f"{at}.conv.bias"] if bias else out


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def selection(part: Mamba, at: str, t: Mapping[str, Tensor], s: dict[str, Any]) -> tuple[Tensor, ...]:
    """x, its gate z, and what depends on the token: dt, B and C, normed in Jamba (arXiv:2403.19887, section 3.2)."""
    x, z = linear(t, f"{at}.in", s["run_in"], part.bias).chunk(2, -1)
    x = F.silu(conv(t, at, x, part.conv_bias))
    dt, b, c = linear(t, f"{at}.x", x).split((part.dt_rank, part.state, part.state), -1)
    if part.inner_norms is not None:
        dt, b, c = (rms(y, part.inner_norms) * t[f"{at}.{n}_norm.weight"]
                    for n, y in (("dt", dt), ("b", b), ("c", c)))
    return x, z, dt, b, c


def mamba(part: Mamba, at: str, t: Mapping[str, Tensor], s: dict[str, Any]) -> Tensor:
    """arXiv:2312.00752, algorithm 2."""
    x, z, dt, b, c = selection(part, at, t, s)
    dt = F.softplus(linear(t, f"{at}.dt", dt, True))
    a = -torch.exp(t[f"{at}.A_log"])
    h, out = torch.zeros(part.inner, part.state), []
    for i in range(len(x)):
        h = torch.exp(dt[i, :, None] * a) * h + dt[i, :, None] * b[i] * x[i, :, None]
        out.append(h @ c[i] + t[f"{at}.D"] * x[i])
    return linear(t, f"{at}.out", torch.stack(out) * F.silu(z), part.bias)


def mamba2(part: Mamba2, at: str, t: Mapping[str, Tensor], s: dict[str, Any]) -> Tensor:
    """arXiv:2405.21060, section 7: one decay per head, B and C shared by the heads of a group."""
    n, d, width = part.heads, part.head_dim, part.groups * part.state
    z, xbc, dt = linear(t, f"{at}.in", s["run_in"], part.bias).split((n * d, n * d + 2 * width, n), -1)
    x, b, c = F.silu(conv(t, at, xbc, part.conv_bias)).split((n * d, width, width), -1)
    b, c = (y.view(-1, part.groups, part.state).repeat_interleave(n // part.groups, 1) for y in (b, c))
    x, dt = x.view(-1, n, d), F.softplus(dt + t[f"{at}.dt_bias"]).clamp(min=s["dt_min"])
    decay = torch.exp(-torch.exp(t[f"{at}.A_log"]) * dt)
    h, out = torch.zeros(n, d, part.state), []
    for i in range(len(x)):
        h = decay[i, :, None, None] * h + (dt[i, :, None] * x[i])[:, :, None] * b[i, :, None]
        out.append((h * c[i, :, None]).sum(-1) + t[f"{at}.D"][:, None] * x[i])
    y = torch.stack(out).flatten(1)
    if part.norm_eps is not None:
        y = rms((y * F.silu(z)).view(-1, part.groups, n * d // part.groups), part.norm_eps).flatten(1)
        y = y * t[f"{at}.norm.weight"]
    else:
        y = y * F.silu(z)
    return linear(t, f"{at}.out", y, part.bias)


def delta_net(part: GatedDeltaNet, at: str, t: Mapping[str, Tensor], s: dict[str, Any]) -> Tensor:
    """arXiv:2412.06464, equation 10: S decays, forgets what k recalls, and learns v."""
    x, shared = s["run_in"], part.v_heads // part.k_heads
    keys, values = part.k_heads * part.k_dim, part.v_heads * part.v_dim
    qkv = torch.cat([linear(t, f"{at}.{one}", x) for one in "qkv"], -1)
    q, k, v = F.silu(conv(t, at, qkv, False)).split((keys, keys, values), -1)
    q, k = (y.view(-1, part.k_heads, part.k_dim).repeat_interleave(shared, 1) for y in (q, k))
    q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    v, beta = v.view(-1, part.v_heads, part.v_dim), torch.sigmoid(linear(t, f"{at}.b", x))
    decay = torch.exp(-torch.exp(t[f"{at}.A_log"]) * F.softplus(linear(t, f"{at}.a", x) + t[f"{at}.dt_bias"]))
    state, out = torch.zeros(part.v_heads, part.k_dim, part.v_dim), []
    for i in range(len(x)):
        state = state * decay[i, :, None, None]
        recalled = (state * k[i, :, :, None]).sum(1)
        state = state + k[i, :, :, None] * (beta[i, :, None] * (v[i] - recalled))[:, None]
        out.append((state * q[i, :, :, None]).sum(1) * part.k_dim**-0.5)
    y = rms(torch.stack(out), part.eps) * t[f"{at}.norm.weight"]
    z = linear(t, f"{at}.z", x).view(-1, part.v_heads, part.v_dim)
    return linear(t, f"{at}.out", (y * F.silu(z)).flatten(1))


def short_conv(part: ShortConv, at: str, t: Mapping[str, Tensor], s: dict[str, Any]) -> Tensor:
    """LFM2 (arXiv:2511.23404): y = C * conv(B * x)."""
    b, c, x = linear(t, f"{at}.in", s["run_in"], part.bias).chunk(3, -1)
    return linear(t, f"{at}.out", c * conv(t, at, b * x, part.bias), part.bias)
