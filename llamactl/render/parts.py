"""What each kind of part is, in a title, a formula and a few sentences: the explanations of `explore`'s drawing."""

from __future__ import annotations

# kind (analysis.outline.Part.kind) -> (title, formula, explanation). {} in a formula: what the part fills in.
PARTS: dict[str, tuple[str, str, str]] = {
    "embedding": ("Token embedding", "x = {}",
                  "One row for each entry of the vocabulary, as wide as the stream. It is looked up: it costs memory "
                  "and no product with a matrix. A larger vocabulary makes texts shorter in tokens and this table "
                  "longer."),
    "learned": ("Learned positions", "x + P[position]",
                "A trained row for each position, added once at the input. The table ends, and the model with it: "
                "there is no row for the next position. A token's row differs from place to place, so that what a "
                "query and a key say to each other depends on where both stand, not on their distance alone."),
    "sinusoidal": ("Sinusoidal positions", "x + [sin(m w_j), cos(m w_j)]",
                   "Fixed sines and cosines of the position, added once at the input. No parameters."),
    "rope": ("RoPE", "q_m = R(m θ_j) q,  k_n = R(n θ_j) k;  q_m · k_n depends on m - n",
             "Pairs of dimensions of q and k, all of them or some, are turned by angles that grow with the "
             "position, in each layer that has it. Turning both by the same amount changes no score, so only the "
             "distance between them counts. There is no table to store and none that ends. V is not turned. The keys "
             "are kept as they were turned."),
    "alibi": ("ALiBi", "score(m, n) - slope_h (m - n)",
              "A penalty on each score that grows with the distance, with a slope of its own for each head. No "
              "parameters, nothing is added to the stream."),
    "layernorm": ("LayerNorm", "(x - mean(x)) / sqrt(var(x) + eps) * g + b",
                  "Takes the mean off, divides by the standard deviation, then scales and shifts: two vectors, 2d "
                  "parameters."),
    "layernorm-scale": ("LayerNorm", "(x - mean(x)) / sqrt(var(x) + eps) * g",
                        "Takes the mean off, divides by the standard deviation, then scales: one vector, d "
                        "parameters."),
    "layernorm-offset": ("LayerNorm", "(x - mean(x)) / sqrt(var(x) + eps) * (1 + g) + b",
                         "Takes the mean off, divides by the standard deviation, then scales and shifts. The weights "
                         "hold what is added to a scale of 1: read as scales themselves, they are wrong."),
    "layernorm-bare": ("LayerNorm", "(x - mean(x)) / sqrt(var(x) + eps)",
                       "Takes the mean off and divides by the standard deviation. Nothing of it is trained."),
    "rmsnorm-offset": ("RMSNorm", "x / sqrt(mean(x²) + eps) * (1 + g)",
                       "Divides by the root mean square and scales: one vector, d parameters. The weights hold what is "
                       "added to a scale of 1: read as scales themselves, they are wrong."),
    "rmsnorm-bare": ("RMSNorm", "x / sqrt(mean(x²) + eps)",
                     "Divides by the root mean square. Nothing of it is trained."),
    "rmsnorm": ("RMSNorm", "x / sqrt(mean(x²) + eps) * g",
                "Divides by the root mean square and scales: one vector, d parameters. The mean stays in; in trained "
                "models it is a few percent of the RMS, which is why leaving it in costs so little."),
    "mha": ("Multi-head attention", "{} v, heads side by side, then o",
            "Every query head has its own keys and values, and all of them are kept: 2 x layers x heads x d_head "
            "elements for each token that a layer still reads."),
    "gqa": ("Grouped-query attention", "{} v; query head h reads KV head h // share",
            "Several query heads read the same keys and values. Fewer KV heads are kept, so the cache shrinks by as "
            "many times as heads share one; the k and v matrices shrink with it, q and o do not."),
    "mqa": ("Multi-query attention", "{} v; all query heads read one KV head",
            "One head of keys and values for all query heads: the smallest cache that plain attention can have."),
    "mla": ("Multi-head latent attention", "c = W_dkv x is kept;  k = W_uk c,  v = W_uv c;  {} v",
            "Keys and values of all heads are rebuilt from one small latent vector. That vector and one rotated key "
            "that all heads share are all that attention reads again, whatever the number of heads."),
    "state": ("Recurrent mixer", "state = f(state, x)",
              "A state of fixed size instead of a cache that grows: what is kept does not depend on the context."),
    "plain": ("Feed-forward", "W_down act(W_up x)",
              "Two matrices, widened and narrowed again. At a width of 4d they hold 8d² parameters, twice what "
              "attention's four square matrices hold: two thirds of a block."),
    "gated": ("Gated feed-forward", "W_down (act(W_gate x) * W_up x)",
              "Three matrices: one path is multiplied by the activation of another. At the same width it holds half as "
              "much again; at 8d/3 it holds what two matrices of 4d do. With SiLU it is called SwiGLU."),
    "moe": ("Mixture of experts", "Σ router_e(x) expert_e(x) over the chosen e",
            "A router picks a few feed-forwards for each token. Memory follows all experts, arithmetic only those that "
            "run."),
    "tied": ("Output head, tied", "logits = {}", "The token embedding is used again: no matrix of its own."),
    "untied": ("Output head", "logits = {}", "A matrix of its own: a row for each entry that can be written."),
    "other": ("Outside the drawing", "", "Stored and counted, but no part of the decoder."),
}
