"""`llamactl convert`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, complete_model, new_app
from llamactl.errors import UsageError

app = new_app()
_DTYPES = {"bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "f16": "F16", "float16": "F16", "fp32": "F32",
           "f32": "F32", "float32": "F32", "q8_0": "Q8_0"}


@command(app)
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", autocompletion=complete_model, show_default=False,
                      help="Folder (Hugging Face, Meta, nanoGPT or written by hand), .gguf file, weights file beside a "
                      "config.json, or a Hub id in the local cache.")],
    target: Annotated[str, typer.Argument(metavar="DST", show_default=False, help="The folder to make; with --to gguf "
                      "also FILE.gguf.")],
    to: Annotated[str, typer.Option("--to", metavar="hf|meta|nanogpt|lesson|gguf", help="The layout to write.")] = "hf",
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="bf16|fp16|fp32|q8_0", show_default=False,
                     help="Default: as stored; quantised weights become fp32. q8_0: with --to gguf.")] = None,
    shard_size: Annotated[str | None, typer.Option("--shard-size", metavar="SIZE", show_default=False,
                          help="At most so much a file, e.g. 5GB. Default: one file.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", metavar="N", min=1, show_default=False, help="Other KV "
                        "heads: fewer are the means of groups, and cost quality; more are copies, and exact.")] = None,
    tie: Annotated[bool | None, typer.Option("--tie/--untie", show_default=False, help="Share the head with the token "
                   "embedding, where the two are equal; or write it as a matrix of its own.")] = None,
    vocab_pad_to: Annotated[int | None, typer.Option("--vocab-pad-to", metavar="N", min=1, show_default=False,
                            help="Rows of zeros up to N tokens.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", min=1, max=99, help="With --to meta: files, one for "
                     "each tensor-parallel rank.")] = 1,
    context: Annotated[int | None, typer.Option("--context", metavar="N", min=1, max=1 << 30, show_default=False,
                       help="Positions of a model whose params.json does not say them.")] = None,
    allow_overflow: Annotated[bool, typer.Option("--allow-overflow", help="Clamp values that the type does not hold."
                              )] = False,
    tokenizer: Annotated[bool, typer.Option("--tokenizer/--no-tokenizer", help="Carry tokenizer, generation settings, "
                         "README and licence along.")] = True,
    text: Annotated[str | None, typer.Option("--text", metavar="FILE", show_default=False, help="Measure the loss on "
                    "this text before and after.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The plan, tensor by tensor; nothing is written.")] = False,
    force: Annotated[bool, typer.Option("--force", "--overwrite", help="Replace a checkpoint that is there.")] = False,
    proof: Annotated[bool, typer.Option("--proof/--no-proof", help="Read the output back and compare it, tensors and "
                     "logits, before it is published.")] = True,
    digest: Annotated[bool, typer.Option("--digest/--no-digest", help="A digest of every tensor in the manifest.")
                      ] = True,
    reference: Annotated[bool, typer.Option("--reference", help="Also record what the source answers, so that verify "
                         "can judge the output, and copies of it, without the source.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Move weights between layouts, streaming and atomic, and prove that what was written is what was read.

    Example: llamactl convert ./my-model ./my-model-meta --to meta
    """
    from llamactl.cli.targets import LAYOUTS, Wanted

    if to not in LAYOUTS:
        raise UsageError("usage", f"--to {to!r} is not one of {', '.join(LAYOUTS)}", help=_near(to, LAYOUTS))
    kind = None if dtype is None or dtype == "auto" else _DTYPES.get(dtype.lower())
    if dtype not in (None, "auto") and kind is None:
        raise UsageError("usage", f"--dtype {dtype!r} is not one of bf16, fp16, fp32, q8_0",
                         help=_near(str(dtype), ("bf16", "fp16", "fp32", "q8_0")))
    if kind == "Q8_0" and to != "gguf":
        raise UsageError("usage", "--dtype q8_0 is a GGUF type", help="add --to gguf, or choose bf16, fp16 or fp32")
    if not target.strip():
        raise UsageError("usage", "DST is empty", help="name the folder to make")
    if target.endswith(".gguf") and to != "gguf":
        raise UsageError("usage", f"{target!r} is the name of a GGUF file, and --to {to} makes a folder",
                         help="add --to gguf, or name a folder")
    if reference and target.endswith(".gguf"):
        raise UsageError("usage", f"--reference lies in a folder, beside the weights, and {target!r} is a single file",
                         help="name a folder, or record it apart: llamactl reference SRC -o FILE.safetensors")
    if text is not None and not proof:
        raise UsageError("usage", "--text is measured by the proof: leave --no-proof out")
    if text is not None and dry_run:
        raise UsageError("usage", "--text is measured on what was written: leave --dry-run out")
    from llamactl.cli.converting import convert as run

    wanted = Wanted(layout=to, dtype=kind, shard_bytes=_bytes(shard_size), kv_heads=kv_heads, tied=tie,
                    vocab=vocab_pad_to, ranks=ranks, context=context)
    run(source, target, wanted, out, reach, clamp=allow_overflow, tokenizer=tokenizer, text=text, dry_run=dry_run,
        force=force, proof=proof, digest=digest, reference=reference)


def _bytes(text: str | None) -> int | None:
    from llamactl.spec.quantities import size

    if text is None:
        return None
    found = size(text)
    if found is None or found.floor < 1:
        raise UsageError("usage", f"--shard-size {text!r} is no size", help="write it with its unit: 5GB or 4GiB")
    return found.floor


def _near(word: str, known: tuple[str, ...]) -> str | None:
    from difflib import get_close_matches

    near = get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else None
