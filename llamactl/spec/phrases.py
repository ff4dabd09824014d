"""Values of edits as a person would say them."""

from __future__ import annotations

NORMS = {"final": "the final norm", "attn": "the norm before attention", "mlp": "the norm before the feed-forward",
         "attn_post": "the norm behind attention", "mlp_post": "the norm behind the feed-forward", "q": "q's norm",
         "k": "k's norm", "embed": "the norm of the embedding", "all": "all norms", "layers": "all norms of the layers"}
KINDS = {"layer": "LayerNorm (the mean is taken away)", "rms": "RMSNorm (no mean, no bias)",
         "rms-bias": "RMSNorm with LayerNorm's bias (the mean is not taken away)",
         "rms-outside": "RMSNorm with epsilon outside the root", "rms-sum": "the root of the sum, not of the mean",
         "rms-l2": "division by the L2 norm", "rms-half": "RMSNorm rounded to 16 bits before the weight",
         "layer-unbiased": "LayerNorm with an unbiased variance (n - 1)",
         "layer-outside": "LayerNorm with epsilon outside the root", "layer-centred": "the mean taken away, not scaled",
         "rms-twice": "RMSNorm applied twice", "layer-twice": "LayerNorm applied twice"}
MASKS = {"none": "the causal mask is missing: a token sees all that follow",
         "ahead": "the causal mask is off by one: a token sees the next one",
         "strict": "the causal mask is off by one: a token does not see itself",
         "strict-uniform": "the causal mask is off by one: a token does not see itself, and the first sees all"}
MLPS = {"gate-only": "down(act(gate)), without up,", "up-only": "down(up), without the gate,",
        "product": "down(act(gate up))", "both": "down(act(gate) act(up))", "linear": "without its activation,"}
SIDES = {"q": "q alone", "k": "k alone", "both": "q and k", "none": "nothing", "v": "v alone", "qkv": "q, k and v"}
ORDERS = {"tile": "KV heads are tiled (h mod K) instead of repeated", "reversed": "KV heads are read in reverse",
          "first": "every query head reads the first KV head", "rolled": "query heads read the next KV head"}


def phrase(name: str, value: str, says: str) -> str:
    """What an edit's value means, in the sentence `says` of spec.mistaken (with {} for the value) or a better one."""
    head, _, place = value.partition(":")
    at = f" ({NORMS.get(place, place)})" if place else ""
    if name == "norm_missing":
        return f"{NORMS.get(value, value)} is missing"
    if name == "norm_weight":
        return f"the weights of {NORMS.get(value, value)} were never loaded (all ones)"
    if name == "norm_bias":
        return f"the biases of {NORMS.get(value, value)} are dropped"
    if name == "norms_swapped":
        return f"{' and '.join(NORMS.get(x, x) for x in value.split(','))} are swapped"
    if name == "norm_kind":
        return f"the norm computes something else: {KINDS.get(head, head)}{at}"
    if name == "norm_eps":
        return f"the norms' epsilon is {head}{at}"
    if name == "norm_offset":
        return f"norm weights {'are taken as 1 + weight (an offset)' if head == 'on' else 'lack the offset of 1'}{at}"
    if name == "mask":
        return MASKS.get(value, says.replace("{}", value))
    if name == "position_rows" and value == "first":
        return "every token reads the first row of the learned table: position 0"
    if name == "kv_order":
        return ORDERS.get(value, says.replace("{}", value))
    if name in ("rope_on", "rope_direction"):
        return says.replace("{}", SIDES.get(value, value))
    if name == "mlp":
        return f"the feed-forward is {MLPS.get(value, value)} instead of down(act(gate) up)"
    if name == "rope_dim":
        width, _, over = value.partition("/")
        return f"partial rotary width: {width} dimensions of each head rotate" + (
            f", with exponents that count to {over}" if over else "")
    if name == "constant":
        return f"{place} was never loaded (all {'zeros' if head == 'zero' else 'ones'})"
    if name == "layer_order":
        return _layers(head, place)
    return says.replace("{}", value)


def _layers(kind: str, rest: str) -> str:
    """Orders of layers."""
    return {"missing": f"layer {rest} is missing", "repeated": f"layer {rest} runs twice",
            "twice": f"layer {rest}'s weights stand in the next layer too",
            "swapped": f"layers {rest.replace(',', ' and ')} are swapped",
            "shifted": f"layers are shifted by {rest}, around the end", "clamped": f"layers are shifted by {rest}",
            "strings": "layers are sorted as strings (1, 10, 11, 2)", "reversed": "layers run in reverse",
            "first": "every layer has the weights of the first"}.get(kind, f"layers are out of order ({kind})")
